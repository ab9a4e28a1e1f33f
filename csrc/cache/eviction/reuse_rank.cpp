// ReuseRank: evict the leaf with the smallest chance of a use for each second that it is kept,
// learnt from the traffic itself (ReuseModel). A child of LHD (Beckmann et al., NSDI 2018) with
// classes that fit prompts: uses of the block, turns on its path, does the answer call tools.
// Under it lies a net: two whole shadow caches that hold no tokens, one LRU and one ReuseRank, see
// every request, and the pool follows the one that hits more (SafetyNet).
#include <algorithm>

#include "cache/bug.hpp"
#include "cache/eviction/leaf_cells.hpp"
#include "cache/eviction/policies.hpp"
#include "cache/eviction/reuse_history.hpp"
#include "cache/eviction/safety_net.hpp"

namespace pagemill::cache {

namespace {

class ReuseRank : public EvictionPolicy {
    const uint32_t capacity_;
    const bool has_net_;
    ReuseModel model_;
    ReuseHistory history_;
    LeafCells leaves_, shadow_leaves_;
    SafetyNet net_;
    std::vector<NodeId> node_of_;  // of a block
    std::vector<NodeId> path_;
    uint32_t num_in_shadow_ = 0;

    void look_into_shadows(const RequestEnd &end);
    void admit_to_shadow();
    void evict_from_shadow();
    void learn(const RequestEnd &end);

public:
    ReuseRank(const PolicyConfig &config, bool has_net)
        : capacity_(config.num_blocks - 1),
          has_net_(has_net),
          model_(config.block_tokens, 5 * size_t(config.num_blocks) + 65536),
          history_(capacity_),
          leaves_(model_),
          shadow_leaves_(model_),
          net_(capacity_),
          node_of_(config.num_blocks, 0) {}

    void published(BlockId block, Key key, uint32_t) override {
        node_of_[block] = history_.node_for(key);
        history_[node_of_[block]].block = block;
        history_.recall(node_of_[block]);
    }
    void dropped(BlockId block) override {
        NodeId id = node_of_[block];
        node_of_[block] = 0;
        history_[id].block = kNullBlock;
        history_.remember(id);
    }
    void moved(BlockId from, BlockId to) override {
        history_[node_of_[from]].block = to;
        node_of_[to] = node_of_[from];
        node_of_[from] = 0;
    }
    void add(BlockId leaf) override {
        const ReuseNode &node = history_[node_of_[leaf]];
        leaves_.add(leaf, node.block_class, node.record ? node.record : model_.newest());
    }
    void remove(BlockId leaf) override { leaves_.remove(leaf); }
    BlockId victim() override {
        bool by_rank = !has_net_ || net_.is_following();
        return by_rank ? leaves_.lowest_rank() : leaves_.oldest();
    }
    void advance(uint64_t now_ns) override {
        model_.advance(now_ns);
        leaves_.age();
        if (has_net_) shadow_leaves_.age();
    }
    void request_ended(std::span<const BlockId> path, const RequestEnd &end) override {
        path_.clear();
        for (BlockId block : path) path_.push_back(node_of_[block]);
        if (path_.empty()) return;
        if (has_net_) look_into_shadows(end);
        learn(end);
        if (!has_net_) return;
        for (size_t i = path_.size(); i-- > 0;) history_.use(path_[i]);
        admit_to_shadow();
    }
};

// The prompt is served first, by what each shadow holds of it.
void ReuseRank::look_into_shadows(const RequestEnd &end) {
    const uint32_t num_asked = std::min(end.num_asked_blocks, uint32_t(path_.size()));
    uint32_t num_lru_hits = 0, num_hits = 0;
    while (num_lru_hits < num_asked && history_[path_[num_lru_hits]].is_in_lru) ++num_lru_hits;
    while (num_hits < num_asked && history_[path_[num_hits]].is_in_shadow) ++num_hits;
    for (NodeId id : path_)  // the path is held while the request runs
        if (shadow_leaves_.contains(id)) shadow_leaves_.remove(id);
    net_.add(num_asked, num_lru_hits, num_hits);
}

void ReuseRank::learn(const RequestEnd &end) {
    uint32_t num_turns = 0;
    if (end.is_finished) history_[path_.back()].ends_request = true;
    for (NodeId id : path_) num_turns += history_[id].ends_request;
    uint32_t record = model_.start_record(num_turns, end.has_tool_calls);
    for (NodeId id : path_) {
        ReuseNode &node = history_[id];
        if (node.record) model_.add_reuse(node.record, node.block_class);
        node.block_class = ReuseModel::class_of(++node.num_uses, num_turns, end.has_tool_calls);
        node.record = record;
        model_.add_use(node.block_class);
    }
    model_.finish_record();
}

void ReuseRank::admit_to_shadow() {
    size_t num_admitted = std::min<size_t>(path_.size(), capacity_), num_new = 0;
    for (size_t i = 0; i < num_admitted; ++i) num_new += !history_[path_[i]].is_in_shadow;
    while (num_in_shadow_ + num_new > capacity_) evict_from_shadow();
    for (size_t i = 0; i < num_admitted; ++i) {
        ReuseNode &node = history_[path_[i]];
        if (node.is_in_shadow) continue;
        node.is_in_shadow = true;
        node.parent = i ? path_[i - 1] : 0;
        if (i) ++history_[node.parent].num_shadow_children;
        ++num_in_shadow_;
    }
    const ReuseNode &last = history_[path_[num_admitted - 1]];
    if (last.num_shadow_children == 0)
        shadow_leaves_.add(path_[num_admitted - 1], last.block_class, last.record);
}

void ReuseRank::evict_from_shadow() {
    NodeId id = shadow_leaves_.lowest_rank();
    if (id == LeafCells::kNone) bug("reuse rank: the shadow is full of one path");
    shadow_leaves_.remove(id);
    ReuseNode &node = history_[id];
    node.is_in_shadow = false;
    --num_in_shadow_;
    if (NodeId parent = node.parent; parent && --history_[parent].num_shadow_children == 0) {
        bool is_on_path = history_[parent].record == model_.newest();
        if (!is_on_path)
            shadow_leaves_.add(parent, history_[parent].block_class, history_[parent].record);
    }
    if (node.block == kNullBlock) history_.remember(id);
}

}  // namespace

PolicyPointer make_reuse_rank(const PolicyConfig &config) {
    return std::make_unique<ReuseRank>(config, true);
}
PolicyPointer make_reuse_rank_plain(const PolicyConfig &config) {
    return std::make_unique<ReuseRank>(config, false);
}

}  // namespace pagemill::cache
