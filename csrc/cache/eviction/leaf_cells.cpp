#include "cache/eviction/leaf_cells.hpp"

#include <algorithm>

namespace pagemill::cache {

LeafCells::LeafCells(const ReuseModel &model)
    : model_(model), cells_(ReuseModel::kNumCells), filled_(ReuseModel::kNumCells) {}

void LeafCells::push(uint32_t cell, const Entry &entry) {
    if (cells_[cell].empty()) filled_.insert(model_.place_of(cell));
    cells_[cell].push_back(entry);
    std::push_heap(cells_[cell].begin(), cells_[cell].end());
    ++num_entries_;
}

void LeafCells::pop(uint32_t cell) {
    std::pop_heap(cells_[cell].begin(), cells_[cell].end());
    cells_[cell].pop_back();
    --num_entries_;
    if (cells_[cell].empty()) filled_.erase(model_.place_of(cell));
}

// True when the cell's front is a leaf; what is not goes.
bool LeafCells::clean(uint32_t cell) {
    while (!cells_[cell].empty() && !is_live(cells_[cell].front())) pop(cell);
    return !cells_[cell].empty();
}

void LeafCells::compact() {
    num_entries_ = 0;
    for (uint32_t cell = 0; cell < cells_.size(); ++cell) {
        auto &entries = cells_[cell];
        if (entries.empty()) continue;
        std::erase_if(entries, [this](const Entry &entry) { return !is_live(entry); });
        std::make_heap(entries.begin(), entries.end());
        num_entries_ += entries.size();
        if (entries.empty()) filled_.erase(model_.place_of(cell));
    }
}

void LeafCells::follow_ranking() {
    if (num_rankings_ == model_.num_rankings()) return;
    num_rankings_ = model_.num_rankings();
    filled_ = BitTree(ReuseModel::kNumCells);
    for (uint32_t cell = 0; cell < cells_.size(); ++cell)
        if (!cells_[cell].empty()) filled_.insert(model_.place_of(cell));
}

void LeafCells::add(uint32_t leaf, uint8_t block_class, uint32_t record) {
    follow_ranking();
    if (num_entries_ > 2 * num_leaves_ + 1024) compact();
    if (leaf >= stamp_.size()) stamp_.resize(leaf + leaf / 2 + 64, 0);
    uint32_t cell = ReuseModel::cell(block_class, model_.bucket_of(record));
    push(cell, {uint64_t(record) << 32 | ++num_adds_, leaf, ++stamp_[leaf]});
    ++num_leaves_;
}

void LeafCells::remove(uint32_t leaf) {
    ++stamp_[leaf];
    --num_leaves_;
}

void LeafCells::age() {
    follow_ranking();
    for (uint32_t cell = ReuseModel::kNumCells; cell-- > 0;) {  // higher buckets first
        uint32_t bucket = cell % ReuseModel::kNumBuckets;
        while (!cells_[cell].empty() && clean(cell)) {
            Entry front = cells_[cell].front();
            uint32_t now_in = model_.bucket_of(uint32_t(front.age_order >> 32));
            if (now_in == bucket) break;
            pop(cell);
            push(cell - bucket + now_in, front);
        }
    }
}

uint32_t LeafCells::lowest_rank() {
    follow_ranking();
    for (;;) {
        uint32_t place = filled_.smallest();
        if (place == BitTree::kNone) return kNone;
        uint32_t cell = model_.cell_at(place);
        if (!clean(cell)) continue;
        Entry best = cells_[cell].front();
        for (uint32_t next = place + 1; next < cells_.size() && model_.is_tie(place, next); ++next)
            if (uint32_t other = model_.cell_at(next); clean(other))
                best = std::max(best, cells_[other].front());
        return best.leaf;
    }
}

uint32_t LeafCells::oldest() {
    follow_ranking();
    const Entry *best = nullptr;
    for (uint32_t cell = 0; cell < cells_.size(); ++cell)
        if (!cells_[cell].empty() && clean(cell))
            if (!best || *best < cells_[cell].front()) best = &cells_[cell].front();
    return best ? best->leaf : kNone;
}

}  // namespace pagemill::cache
