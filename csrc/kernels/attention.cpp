#include "kernels/attention.hpp"

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "kernels/raw_groups.hpp"
#include "kernels/scratch.hpp"
#include "thread_pool.hpp"

namespace pagemill {
namespace {

// A row tile, the segments it reads, and about what it costs. Where it is split, its partials lie
// at `partials` and the item that finishes last joins them.
struct Work {
    RowTile tile;
    int64_t first_segment, end_segment;
    int64_t cost;
    int64_t num_items = 1;
    float *partials = nullptr;
    std::atomic<int64_t> *num_left = nullptr;
};

struct Item {
    const Work *work;
    int64_t first_segment, end_segment;
    int64_t cost;
};

constexpr int64_t kReadCost = 6;  // reading a token's K and V costs as much as this many rows of it
constexpr int64_t kMinItemCost = kSegmentTokens * 8;
constexpr int64_t kItemsPerThread = 4;

int64_t heads_each(const AttentionCall &call) { return call.num_heads / call.kv.num_kv_heads; }

Work make_work(const AttentionCall &call, const RowTile &tile) {
    const int64_t end = tile.position + tile.num_tokens;
    const int64_t begin =
        call.window ? std::max<int64_t>(0, tile.position - call.window + 1) : int64_t{0};
    const int64_t cost = (end - begin) * (tile.num_tokens * heads_each(call) + kReadCost);
    return {tile, begin / kSegmentTokens, (end - 1) / kSegmentTokens + 1, cost};
}

// Tiles of nearly equal size, all KV heads of a sequence one after another.
void add_tiles(const AttentionCall &call, const SequenceBatch &batch, int64_t i, int64_t first,
               int64_t count, const uint8_t *raw, std::vector<Work> &works) {
    const int64_t most = std::max<int64_t>(1, kTileRows / heads_each(call));
    const int64_t num_tiles = (count + most - 1) / most;
    for (int64_t t = 0; t < num_tiles; ++t) {
        const int64_t begin = first + count * t / num_tiles;
        const int64_t end = first + count * (t + 1) / num_tiles;
        for (int head = 0; head < call.kv.num_kv_heads; ++head) {
            const RowTile tile = {batch.block_ids + batch.indptr[i],
                                  begin,
                                  end - begin,
                                  batch.context_start[i] + begin - batch.query_start[i],
                                  head,
                                  raw};
            works.push_back(make_work(call, tile));
        }
    }
}

// Where whole groups are coded, a token reads its own group raw: a tile lies inside one group.
std::vector<Work> make_works(const AttentionCall &call, const SequenceBatch &batch) {
    std::vector<Work> works;
    if (!codes_whole_groups(call.kv.format)) {
        for (int64_t i = 0; i < batch.num_sequences; ++i) {
            const int64_t first = batch.query_start[i];
            add_tiles(call, batch, i, first, batch.query_start[i + 1] - first, nullptr, works);
        }
        return works;
    }
    const RawPlan plan = plan_raw(batch, call.kv);
    for (int64_t i = 0; i < batch.num_sequences; ++i) {
        const auto end = static_cast<size_t>(plan.first[static_cast<size_t>(i) + 1]);
        for (auto g = static_cast<size_t>(plan.first[static_cast<size_t>(i)]); g < end; ++g) {
            const RawGroup &group = plan.groups[g];
            const int64_t count = group.end_lane - group.first_lane;
            add_tiles(call, batch, i, group.first_row, count, group.raw, works);
        }
    }
    return works;
}

int64_t rows_of(const AttentionCall &call, const RowTile &tile) {
    return tile.num_tokens * heads_each(call);
}

// Splits what is longer than its share; returns the floats that the partials need.
int64_t plan_splits(const AttentionCall &call, std::vector<Work> &works) {
    int64_t total = 0, num_floats = 0;
    for (const Work &work : works) total += work.cost;
    const int64_t share = std::max(kMinItemCost, total / (kItemsPerThread * num_threads()));
    for (Work &work : works) {
        const int64_t num_segments = work.end_segment - work.first_segment;
        if (num_threads() == 1 || work.cost <= share || num_segments == 1) continue;
        work.num_items = std::min(num_segments, (work.cost + share - 1) / share);
        num_floats += num_segments * kernels().partial_floats(call, rows_of(call, work.tile));
    }
    return num_floats;
}

std::vector<Item> make_items(const AttentionCall &call, std::vector<Work> &works, float *partials,
                             std::atomic<int64_t> *counters) {
    std::vector<Item> items;
    for (Work &work : works) {
        const int64_t count = work.end_segment - work.first_segment;
        if (work.num_items > 1) {
            work.partials = partials;
            work.num_left = counters++;
            *work.num_left = work.num_items;
            partials += count * kernels().partial_floats(call, rows_of(call, work.tile));
        }
        for (int64_t i = 0; i < work.num_items; ++i) {
            items.push_back({&work, work.first_segment + count * i / work.num_items,
                             work.first_segment + count * (i + 1) / work.num_items,
                             work.cost / work.num_items});
        }
    }
    auto costs_more = [](const Item &a, const Item &b) { return a.cost > b.cost; };
    std::stable_sort(items.begin(), items.end(), costs_more);
    return items;
}

void run_item(const AttentionCall &call, const Item &item, int64_t scratch_floats) {
    const Work &work = *item.work;
    float *scratch = thread_scratch(scratch_floats);
    if (!work.partials) {
        return kernels().attend(call, work.tile, item.first_segment, item.end_segment, nullptr,
                                scratch);
    }
    const int64_t stride = kernels().partial_floats(call, rows_of(call, work.tile));
    float *partials = work.partials + (item.first_segment - work.first_segment) * stride;
    kernels().attend(call, work.tile, item.first_segment, item.end_segment, partials, scratch);
    if (work.num_left->fetch_sub(1) == 1) {
        kernels().merge(call, work.tile, work.partials, work.end_segment - work.first_segment);
    }
}

}  // namespace

const char *check_batch(const SequenceBatch &batch, const KvView &kv, int64_t num_tokens,
                        int64_t num_block_ids) {
    const int64_t n = batch.num_sequences;
    if (batch.query_start[0] != 0 || batch.query_start[n] != num_tokens) {
        return "query_start must run from 0 to the number of tokens";
    }
    if (batch.indptr[0] < 0 || batch.indptr[n] > num_block_ids) {
        return "indptr points outside of block_ids";
    }
    for (int64_t i = 0; i < n; ++i) {
        const int64_t count = batch.query_start[i + 1] - int64_t{batch.query_start[i]};
        const int64_t blocks = batch.indptr[i + 1] - int64_t{batch.indptr[i]};
        if (count < 0 || blocks < 0) return "query_start and indptr must not descend";
        if (batch.context_start[i] < 0) return "context_start is negative";
        if (count && (batch.context_start[i] + count - 1) / kv.block_size >= blocks) {
            return "a block table is shorter than its sequence";
        }
    }
    for (int64_t i = batch.indptr[0]; i < batch.indptr[n]; ++i) {
        if (batch.block_ids[i] < 0 || batch.block_ids[i] >= kv.num_blocks) {
            return "a block id lies outside of the pool";
        }
    }
    return nullptr;
}

void paged_attention(const AttentionCall &call, const SequenceBatch &batch) {
    std::vector<Work> works = make_works(call, batch);
    if (works.empty()) return;
    float *partials = caller_scratch(plan_splits(call, works));
    auto counters = std::make_unique<std::atomic<int64_t>[]>(works.size());
    const std::vector<Item> items = make_items(call, works, partials, counters.get());
    int64_t num_rows = 0;
    for (const Work &work : works) num_rows = std::max(num_rows, rows_of(call, work.tile));
    const int64_t scratch_floats = kernels().attention_scratch_floats(call, num_rows);
    parallel_for(static_cast<int64_t>(items.size()),
                 [&](int64_t i) { run_item(call, items[static_cast<size_t>(i)], scratch_floats); });
}

}  // namespace pagemill
