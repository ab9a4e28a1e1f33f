// How an attention call is cut into items for the threads.
//
//     works     one row tile each: query rows of one sequence, all segments they read
//     shared    query rows of several sequences that read the same blocks, over those blocks alone
//     items     segments of a work or of a shared run; a thread takes one at a time
//
// A segment (512 tokens) gives a partial softmax; a work that was split, or has a part in a shared
// run, keeps its partials beside each other, and the item that finishes last joins them in the
// order of segments. So a row's result is the same bits however its call was cut.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "kernels/attention.hpp"

namespace pagemill {

struct Work {
    RowTile tile;
    int64_t first_segment, end_segment;
    std::vector<bool> is_shared;  // of each segment, where some are
    int64_t num_items = 0;
    float *partials = nullptr;  // [segments][heads of the tile]
    std::atomic<int64_t> *num_left = nullptr;

    int64_t num_segments() const { return end_segment - first_segment; }
};

struct SharedWork {
    RowTile tile;  // its rows are those of the members, one token each
    std::vector<int32_t> token_rows;
    std::vector<size_t> members;  // works, in the order of the rows
    int64_t first_segment, end_segment;
};

struct Item {
    size_t index;
    bool is_shared;
    int64_t first_segment, end_segment;
    int64_t cost;
};

struct AttentionPlan {
    std::vector<Work> works;
    std::vector<SharedWork> shared;
    std::vector<Item> items;  // the most costly first
    std::unique_ptr<std::atomic<int64_t>[]> counters;
    int64_t scratch_floats = 0;  // of a thread
};

// Partials lie in the caller's scratch until the next call of the same thread.
AttentionPlan plan_attention(const AttentionCall &call, const SequenceBatch &batch);

int64_t rows_of(const AttentionCall &call, const RowTile &tile);

}  // namespace pagemill
