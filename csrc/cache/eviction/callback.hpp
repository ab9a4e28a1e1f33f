// A policy that asks outside: for research, not for speed. The rank of a leaf is asked when it
// becomes one and again when it is about to go; if it has grown past the next one's, that goes
// first.
#pragma once

#include "cache/eviction/leaf_heap.hpp"

namespace pagemill::cache {

struct PolicyCallbacks {
    // What a block is and that it was used: (block, key, position, now_ns, is_new).
    std::function<void(BlockId, Key, uint32_t, uint64_t, bool)> touch;
    std::function<double(BlockId, uint64_t)> rank;  // (block, now_ns); the smallest goes first
    std::function<void(BlockId)> drop;
};

class CallbackPolicy : public EvictionPolicy {
    struct Fact {
        Key key;
        uint32_t position;
    };
    PolicyCallbacks calls_;
    Zeroed<Fact> facts_;
    LeafHeap leaves_;
    const uint64_t *now_ns_;
    uint64_t clock_ = 0;

    void touch(BlockId block, bool is_new) {
        calls_.touch(block, facts_[block].key, facts_[block].position, *now_ns_, is_new);
    }
    void push(BlockId leaf) { leaves_.push(leaf, calls_.rank(leaf, *now_ns_), ++clock_); }

public:
    CallbackPolicy(const PolicyConfig &config, PolicyCallbacks calls)
        : calls_(std::move(calls)),
          facts_(config.num_blocks),
          leaves_(config.num_blocks),
          now_ns_(config.now_ns) {}

    void published(BlockId block, Key key, uint32_t position) override {
        facts_[block] = {key, position};
        touch(block, true);
    }
    void used(BlockId block, Use use) override {
        if (use == Use::kFound) touch(block, false);
    }
    void dropped(BlockId block) override { calls_.drop(block); }
    void moved(BlockId from, BlockId to) override {
        facts_[to] = facts_[from];
        calls_.drop(from);
        touch(to, true);
    }
    void add(BlockId leaf) override { push(leaf); }
    void remove(BlockId leaf) override { leaves_.erase(leaf); }
    BlockId victim() override {
        for (size_t turn = leaves_.num_leaves(); turn > 0; --turn) {
            BlockId leaf = leaves_.top();
            double before = leaves_.top_rank(), rank = calls_.rank(leaf, *now_ns_);
            if (!(rank > before)) return leaf;
            leaves_.erase(leaf);
            leaves_.push(leaf, rank, ++clock_);
        }
        return leaves_.top();
    }
};

}  // namespace pagemill::cache
