// Least recently used first, for the bands and tenants beside the usual one. A block belongs to one
// of them at a time, so all share the links: however many there are, each is a few words.
//
// A leaf that was released just now goes to the young end. One that became a leaf because its child
// was evicted was released right after that child, so it is the oldest now; and so is one whose
// lifetime has ended.
#pragma once

#include "cache/eviction/policy.hpp"
#include "cache/zeroed.hpp"

namespace pagemill::cache {

struct LeafLinks {
    Zeroed<BlockId> younger, older;
    explicit LeafLinks(uint32_t num_blocks) : younger(num_blocks), older(num_blocks) {}
};

class LinkedLru : public EvictionPolicy {
    LeafLinks &links_;
    BlockId oldest_ = kNullBlock, youngest_ = kNullBlock, just_released_ = kNullBlock;

public:
    explicit LinkedLru(LeafLinks &links) : links_(links) {}

    void published(BlockId, Key, uint32_t) override {}
    void moved(BlockId, BlockId) override {}
    void used(BlockId block, Use use) override {
        if (use == Use::kReleased) just_released_ = block;
    }
    BlockId victim() override { return oldest_; }

    void add(BlockId leaf) override {
        const bool is_young = leaf == just_released_;
        BlockId &end = is_young ? youngest_ : oldest_;
        links_.younger[leaf] = is_young ? kNullBlock : end;
        links_.older[leaf] = is_young ? end : kNullBlock;
        if (end != kNullBlock) (is_young ? links_.younger : links_.older)[end] = leaf;
        end = leaf;
        if (oldest_ == kNullBlock) oldest_ = leaf;
        if (youngest_ == kNullBlock) youngest_ = leaf;
    }
    void remove(BlockId leaf) override {
        const BlockId younger = links_.younger[leaf], older = links_.older[leaf];
        (older != kNullBlock ? links_.younger[older] : oldest_) = younger;
        (younger != kNullBlock ? links_.older[younger] : youngest_) = older;
    }
};

}  // namespace pagemill::cache
