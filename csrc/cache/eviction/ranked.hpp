// The base of policies that rank a leaf once, when it becomes one: all of them but the queues.
#pragma once

#include "cache/eviction/leaf_heap.hpp"

namespace pagemill::cache {

class RankedPolicy : public EvictionPolicy {
protected:
    struct Fact {
        uint64_t published, released;  // moments of a clock that counts events
        uint32_t position, num_uses;
        double value;
    };
    Zeroed<Fact> facts_;
    LeafHeap leaves_;
    uint64_t clock_ = 0;

    // Smaller goes first; `tie` decides between equals.
    virtual double rank(const Fact &fact) const = 0;
    virtual uint64_t tie(const Fact &fact) const { return fact.released; }

public:
    explicit RankedPolicy(const PolicyConfig &config)
        : facts_(config.num_blocks), leaves_(config.num_blocks) {}

    void published(BlockId block, Key, uint32_t position) override {
        ++clock_;
        facts_[block] = {clock_, clock_, position, 1, 0.0};
    }
    void used(BlockId block, Use use) override {
        if (use == Use::kFound) ++facts_[block].num_uses;
        else facts_[block].released = ++clock_;
    }
    void moved(BlockId from, BlockId to) override { facts_[to] = facts_[from]; }
    void add(BlockId leaf) override { leaves_.push(leaf, rank(facts_[leaf]), tie(facts_[leaf])); }
    void remove(BlockId leaf) override { leaves_.erase(leaf); }
    BlockId victim() override { return leaves_.top(); }
};

}  // namespace pagemill::cache
