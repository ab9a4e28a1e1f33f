// Leaves by cell: a class of blocks and a bucket of ages. Within a cell the oldest record is first,
// so of each cell only one leaf needs to be looked at. Removal is lazy, as in LeafHeap.
#pragma once

#include <vector>

#include "cache/bit_tree.hpp"
#include "cache/eviction/reuse_model.hpp"

namespace pagemill::cache {

class LeafCells {
    struct Entry {
        uint64_t age_order;  // record, then the order of adding: the tail of a run first
        uint32_t leaf, stamp;
        bool operator<(const Entry &other) const { return age_order > other.age_order; }
    };
    const ReuseModel &model_;
    std::vector<std::vector<Entry>> cells_;
    std::vector<uint32_t> stamp_;  // of a leaf; odd while it is in
    BitTree filled_;               // places (in the order of the model) of cells with entries
    uint32_t num_rankings_ = 0, num_adds_ = 0;
    size_t num_leaves_ = 0, num_entries_ = 0;

    bool is_live(const Entry &entry) const { return stamp_[entry.leaf] == entry.stamp; }
    void push(uint32_t cell, const Entry &entry);
    void pop(uint32_t cell);
    bool clean(uint32_t cell);
    void compact();
    void follow_ranking();

public:
    static constexpr uint32_t kNone = 0;

    explicit LeafCells(const ReuseModel &model);

    // leaf > 0: a block id or a node, any small number.
    void add(uint32_t leaf, uint8_t block_class, uint32_t record);
    void remove(uint32_t leaf);
    bool contains(uint32_t leaf) const { return leaf < stamp_.size() && (stamp_[leaf] & 1); }
    // Time has passed: leaves that are in another bucket now change cells.
    void age();
    uint32_t lowest_rank();
    uint32_t oldest();
};

}  // namespace pagemill::cache
