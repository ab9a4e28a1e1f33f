// Leaves in the order of a rank; the smallest is the victim, of equals the one with the smaller
// tie. Removal is lazy: an entry counts only while it carries its leaf's stamp.
#pragma once

#include <algorithm>
#include <vector>

#include "cache/eviction/policy.hpp"

namespace pagemill::cache {

class LeafHeap {
    struct Entry {
        double rank;
        uint64_t tie;
        BlockId leaf;
        uint32_t stamp;
        bool operator<(const Entry &other) const {  // the heap's front is its largest
            return rank != other.rank ? rank > other.rank : tie > other.tie;
        }
    };
    std::vector<Entry> entries_;
    Zeroed<uint32_t> stamp_;  // odd while the leaf is in
    size_t num_leaves_ = 0;

    bool is_live(const Entry &entry) const { return stamp_[entry.leaf] == entry.stamp; }
    void pop() {
        std::pop_heap(entries_.begin(), entries_.end());
        entries_.pop_back();
    }
    void compact() {
        std::erase_if(entries_, [this](const Entry &entry) { return !is_live(entry); });
        std::make_heap(entries_.begin(), entries_.end());
    }

public:
    explicit LeafHeap(uint32_t num_blocks) : stamp_(num_blocks) {}

    bool contains(BlockId leaf) const { return stamp_[leaf] & 1; }
    size_t num_leaves() const { return num_leaves_; }

    void push(BlockId leaf, double rank, uint64_t tie) {
        if (entries_.size() > 2 * num_leaves_ + 64) compact();
        entries_.push_back({rank, tie, leaf, ++stamp_[leaf]});
        std::push_heap(entries_.begin(), entries_.end());
        ++num_leaves_;
    }
    void erase(BlockId leaf) {
        ++stamp_[leaf];
        --num_leaves_;
    }
    BlockId top() {
        while (!entries_.empty() && !is_live(entries_.front())) pop();
        return entries_.empty() ? kNullBlock : entries_.front().leaf;
    }
    double top_rank() const { return entries_.front().rank; }  // after top()
};

}  // namespace pagemill::cache
