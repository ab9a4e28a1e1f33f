// ReuseRank: evict the leaf with the smallest chance of a use for each second that it is kept,
// learnt from the traffic itself (ReuseModel). A child of LHD (Beckmann et al., NSDI 2018) with
// classes that fit prompts: uses of the block, turns on its path, does the answer call tools.
// Under it lies a net: two whole shadow caches that hold no tokens, one LRU and one ReuseRank, see
// every request, and say how many of the blocks that LRU would hold the pool may lack (SafetyNet).
#include <algorithm>

#include "cache/bug.hpp"
#include "cache/eviction/leaf_cells.hpp"
#include "cache/eviction/policies.hpp"
#include "cache/eviction/reuse_history.hpp"
#include "cache/eviction/safety_net.hpp"

namespace pagemill::cache {

namespace {

enum class Net { kNone, kTrusting, kStrict };

class ReuseRank : public EvictionPolicy {
    const uint32_t capacity_;
    const bool has_net_;
    const uint64_t *now_ns_;
    ReuseModel model_;
    ReuseHistory history_;
    LeafCells leaves_, extra_leaves_, shadow_leaves_;  // extra: those that LRU would not hold
    SafetyNet net_;
    std::vector<NodeId> node_of_;  // of a block
    std::vector<NodeId> path_;
    uint32_t num_in_shadow_ = 0;
    uint32_t num_lacking_ = 0;  // in the LRU shadow, and not in the pool

    ReuseNode &node_of(BlockId block) { return history_[node_of_[block]]; }
    uint32_t record_of(BlockId leaf) {
        uint32_t record = node_of(leaf).record;
        return record ? record : model_.newest();
    }
    void add_extra(BlockId leaf) {
        extra_leaves_.add(leaf, node_of(leaf).block_class, record_of(leaf));
    }
    void catch_up() {
        if (!model_.advance(*now_ns_)) return;
        leaves_.age();
        if (!has_net_) return;
        extra_leaves_.age();
        shadow_leaves_.age();
    }
    void look_into_shadows(const RequestEnd &end);
    void admit_to_lru();
    void admit_to_shadow();
    void evict_from_shadow();
    void learn(const RequestEnd &end);

public:
    ReuseRank(const PolicyConfig &config, Net net)
        : capacity_(config.num_blocks - 1),
          has_net_(net != Net::kNone),
          now_ns_(config.now_ns),
          model_(config.block_tokens, 5 * size_t(config.num_blocks) + 65536),
          history_(capacity_),
          leaves_(model_),
          extra_leaves_(model_),
          shadow_leaves_(model_),
          net_(capacity_, net == Net::kStrict),
          node_of_(config.num_blocks, 0) {}

    void published(BlockId block, Key key, uint32_t) override {
        node_of_[block] = history_.node_for(key);
        node_of(block).block = block;
        history_.recall(node_of_[block]);
        num_lacking_ -= node_of(block).is_in_lru;
    }
    void dropped(BlockId block) override {
        NodeId id = node_of_[block];
        node_of_[block] = 0;
        history_[id].block = kNullBlock;
        num_lacking_ += history_[id].is_in_lru;
        history_.remember(id);
    }
    void moved(BlockId from, BlockId to) override {
        history_[node_of_[from]].block = to;
        node_of_[to] = node_of_[from];
        node_of_[from] = 0;
    }
    void add(BlockId leaf) override {
        catch_up();
        leaves_.add(leaf, node_of(leaf).block_class, record_of(leaf));
        if (has_net_ && !node_of(leaf).is_in_lru) add_extra(leaf);
    }
    void remove(BlockId leaf) override {
        leaves_.remove(leaf);
        if (has_net_ && extra_leaves_.contains(leaf)) extra_leaves_.remove(leaf);
    }
    // Where the pool may lack no more, what LRU would not hold goes; if all of that is held, LRU's.
    BlockId victim() override {
        catch_up();
        BlockId leaf = leaves_.lowest_rank();
        if (!has_net_ || leaf == kNullBlock) return leaf;
        if (!node_of(leaf).is_in_lru || net_.may_lack(num_lacking_ + 1)) return leaf;
        BlockId extra = extra_leaves_.lowest_rank();
        return extra != kNullBlock ? extra : leaves_.oldest();
    }
    void request_ended(std::span<const BlockId> path, const RequestEnd &end) override {
        catch_up();
        path_.clear();
        for (BlockId block : path) path_.push_back(node_of_[block]);
        if (path_.empty()) return;
        if (has_net_) look_into_shadows(end);
        learn(end);
        if (!has_net_) return;
        admit_to_lru();
        admit_to_shadow();
    }
};

// The prompt is served first, by what each shadow holds of it.
void ReuseRank::look_into_shadows(const RequestEnd &end) {
    const uint32_t num_asked = std::min(end.num_asked_blocks, uint32_t(path_.size()));
    uint32_t num_lru_hits = 0, num_shadow_hits = 0;
    while (num_lru_hits < num_asked && history_[path_[num_lru_hits]].is_in_lru) ++num_lru_hits;
    while (num_shadow_hits < num_asked && history_[path_[num_shadow_hits]].is_in_shadow)
        ++num_shadow_hits;
    for (NodeId id : path_)  // the path is held while the request runs
        if (shadow_leaves_.contains(id)) shadow_leaves_.remove(id);
    net_.add(num_asked, num_lru_hits, num_shadow_hits, std::min(end.num_hit_blocks, num_asked));
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

void ReuseRank::admit_to_lru() {
    for (size_t i = path_.size(); i-- > 0;) {
        NodeId gone = history_.use(path_[i]);
        if (gone == 0) continue;
        BlockId block = history_[gone].block;
        if (block == kNullBlock) --num_lacking_;
        else if (leaves_.contains(block)) add_extra(block);
    }
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
    return std::make_unique<ReuseRank>(config, Net::kTrusting);
}
PolicyPointer make_reuse_rank_strict(const PolicyConfig &config) {
    return std::make_unique<ReuseRank>(config, Net::kStrict);
}
PolicyPointer make_reuse_rank_plain(const PolicyConfig &config) {
    return std::make_unique<ReuseRank>(config, Net::kNone);
}

}  // namespace pagemill::cache
