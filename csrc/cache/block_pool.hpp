// The blocks of one layer group: reference counts, the empty blocks, the evictable ones in order.
//
//     EMPTY --allocate--> HELD --drop_reference, last--> (the caller decides) EMPTY or EVICTABLE
//     EVICTABLE --take_reference--> HELD        EVICTABLE --make_empty--> EMPTY
//
// 1. empty + evictable + held + the null block = the pool.
// 2. A block is in the evictable list exactly when it is published and its reference count is 0;
//    the list runs from the least to the most recently used.
// 3. A held, published block heads a ring of the held blocks of the same content, its duplicates.
//    List and ring share their links: no block is in both.
#pragma once

#include <cstdint>
#include <span>

#include "cache/bit_tree.hpp"
#include "cache/zeroed.hpp"

namespace pagemill::cache {

using BlockId = uint32_t;
inline constexpr BlockId kNullBlock = 0;

class BlockPool {
    uint32_t num_blocks_, num_empty_, num_evictable_ = 0;
    Zeroed<uint32_t> ref_count_;
    Zeroed<BlockId> next_, prev_;  // those of the null block are the ends of the evictable list
    BitTree empty_;
    BitTree empty_quads_;  // aligned runs of four blocks that are all empty

    void link_before(BlockId position, BlockId block);
    void unlink(BlockId block);
    void start_ring(BlockId block) { next_[block] = prev_[block] = block; }

public:
    explicit BlockPool(uint32_t num_blocks);

    uint32_t num_blocks() const { return num_blocks_; }
    uint32_t num_empty() const { return num_empty_; }
    uint32_t num_evictable() const { return num_evictable_; }
    uint32_t num_held() const { return num_blocks_ - 1 - num_empty_ - num_evictable_; }
    uint32_t num_available() const { return num_empty_ + num_evictable_; }
    uint32_t ref_count(BlockId block) const { return ref_count_[block]; }
    bool is_empty(BlockId block) const { return empty_.contains(block); }
    size_t num_bytes() const;

    // Takes an empty block, with one reference. Prefers previous + 1, so that a table's blocks lie
    // side by side; else it opens an aligned run of four, which then stays free for this table's
    // growth while other whole runs are left; else the smallest.
    BlockId allocate(BlockId previous);

    // One more holder. An evictable block leaves the list.
    void take_reference(BlockId block);
    // One holder less; true when it was the last.
    bool drop_reference(BlockId block) { return --ref_count_[block] == 0; }
    // Every block is held and stands only once in the list; else a Bug, and nothing has changed.
    void check_release(std::span<const BlockId> blocks);

    // Reference count 0 -> EVICTABLE, as the most recently used.
    void make_evictable(BlockId block);
    // Reference count 0 -> EMPTY, from the list or straight from HELD.
    void make_empty(BlockId block, bool was_evictable);

    // The evictable list, oldest first; kNullBlock ends it.
    BlockId oldest() const { return next_[kNullBlock]; }
    BlockId next(BlockId block) const { return next_[block]; }
    BlockId prev(BlockId block) const { return prev_[block]; }
    void swap_positions(BlockId a, BlockId b);  // of two evictable blocks; O(1)

    // Rings of duplicates (held blocks only).
    bool is_alone(BlockId block) const { return next_[block] == block; }
    void join_ring(BlockId head, BlockId block) { link_before(head, block); }
    void leave_ring(BlockId block) { unlink(block); }
};

}  // namespace pagemill::cache
