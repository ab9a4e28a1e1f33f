#include "cache/eviction/reuse_history.hpp"

namespace pagemill::cache {

NodeId ReuseHistory::node_for(Key key) {
    NodeId id = by_key_.find(key);
    for (; id && nodes_[id].block != kNullBlock; id = by_key_.find(key)) ++key;  // keys collide
    if (id) return id;
    if (free_.empty()) {
        id = NodeId(nodes_.size());
        nodes_.emplace_back();
    } else {
        id = free_.back();
        free_.pop_back();
        nodes_[id] = {};
    }
    nodes_[id].key = key;
    by_key_.set(key, id);
    return id;
}

void ReuseHistory::link_newest(NodeId id) {
    ReuseNode &ends = nodes_[0], &node = nodes_[id];
    node.older = ends.older;  // of the ends: older = the newest node, newer = the oldest
    node.newer = 0;
    nodes_[node.older].newer = id;
    ends.older = id;
}

void ReuseHistory::unlink(NodeId id) {
    const ReuseNode &node = nodes_[id];
    nodes_[node.newer].older = node.older;
    nodes_[node.older].newer = node.newer;
}

NodeId ReuseHistory::use(NodeId id) {
    if (nodes_[id].is_in_lru) unlink(id);
    else ++num_in_lru_;
    nodes_[id].is_in_lru = true;
    link_newest(id);
    if (num_in_lru_ <= capacity_) return 0;
    NodeId oldest = nodes_[0].newer;
    unlink(oldest);
    nodes_[oldest].is_in_lru = false;
    --num_in_lru_;
    if (nodes_[oldest].block == kNullBlock && !nodes_[oldest].is_in_shadow) remember(oldest);
    return oldest;
}

void ReuseHistory::remember(NodeId id) {
    if (!nodes_[id].remembered) ++num_remembered_;
    nodes_[id].remembered = ++clock_ ? clock_ : ++clock_;
    evicted_.emplace_back(id, clock_);
    while (num_remembered_ > kRememberedShare * capacity_) forget_oldest();
    if (evicted_.size() > 2 * num_remembered_ + 64)
        std::erase_if(evicted_, [this](const auto &entry) {
            return nodes_[entry.first].remembered != entry.second;
        });
}

void ReuseHistory::recall(NodeId id) {
    if (nodes_[id].remembered) --num_remembered_;
    nodes_[id].remembered = 0;
}

// Its entry may be stale: the node was cached again, or evicted once more.
void ReuseHistory::forget_oldest() {
    auto [id, moment] = evicted_.front();
    evicted_.pop_front();
    ReuseNode &node = nodes_[id];
    if (node.remembered != moment) return;
    recall(id);
    if (node.is_in_lru || node.is_in_shadow || node.block != kNullBlock) return;
    by_key_.erase(node.key);
    free_.push_back(id);
}

}  // namespace pagemill::cache
