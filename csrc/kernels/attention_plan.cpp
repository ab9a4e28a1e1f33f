#include "kernels/attention_plan.hpp"

#include <algorithm>

#include "kernels/raw_groups.hpp"
#include "kernels/scratch.hpp"
#include "thread_pool.hpp"

namespace pagemill {
namespace {

constexpr int64_t kReadCost = 6;  // reading a token's K and V costs as much as this many rows of it
constexpr int64_t kMinItemCost = kSegmentTokens * 8;
constexpr int64_t kItemsPerThread = 4;
constexpr int64_t kLongPiece = 8192;  // bytes
constexpr int64_t kFewRows = 8;  // of a tile whose KV heads are read in turn
constexpr int64_t kSharedRows = 64;    // rows of a tile over a shared run
constexpr int64_t kSharedSegments = 4;  // of an item: its partials are small enough for the cache

int64_t heads_each(const AttentionCall &call) { return call.num_heads / call.kv.num_kv_heads; }

// KV heads that are read in turn: many rows are bound by products, and a long piece of memory for
// each head needs no neighbour.
int heads_together(const AttentionCall &call, int64_t num_tokens) {
    const int64_t piece_bytes = call.kv.tile_bytes / call.kv.num_kv_heads;
    const bool is_alone = num_tokens * heads_each(call) > kFewRows || piece_bytes >= kLongPiece;
    return is_alone ? 1 : kHeadsTogether;
}

Work make_work(const AttentionCall &call, const RowTile &tile) {
    const int64_t end = tile.position + tile.num_tokens;
    const int64_t begin =
        call.window ? std::max<int64_t>(0, tile.position - call.window + 1) : int64_t{0};
    Work work = {};
    work.tile = tile;
    work.first_segment = begin / kSegmentTokens;
    work.end_segment = (end - 1) / kSegmentTokens + 1;
    return work;
}

int64_t cost_of(const AttentionCall &call, const RowTile &tile, int64_t first, int64_t end) {
    const int64_t last = std::min(end * kSegmentTokens, tile.position + tile.num_tokens);
    const int64_t tokens = std::max<int64_t>(1, last - first * kSegmentTokens);
    return tokens * (rows_of(call, tile) + kReadCost) * tile.num_heads;
}

// Tiles of nearly equal size, all KV heads of a sequence one after another.
void add_tiles(const AttentionCall &call, const SequenceBatch &batch, int64_t i, int64_t first,
               int64_t count, const uint8_t *raw, std::vector<Work> &works) {
    const int64_t most = std::max<int64_t>(1, kTileRows / heads_each(call));
    const int64_t num_tiles = (count + most - 1) / most;
    for (int64_t t = 0; t < num_tiles; ++t) {
        const int64_t begin = first + count * t / num_tiles;
        const int64_t end = first + count * (t + 1) / num_tiles;
        const int together = heads_together(call, end - begin);
        for (int head = 0; head < call.kv.num_kv_heads; head += together) {
            RowTile tile = {};
            tile.table = batch.block_ids + batch.indptr[i];
            tile.first_token = begin;
            tile.num_tokens = end - begin;
            tile.position = batch.context_start[i] + begin - batch.query_start[i];
            tile.kv_head = head;
            tile.num_heads = std::min(together, call.kv.num_kv_heads - head);
            tile.raw = raw;
            works.push_back(make_work(call, tile));
        }
    }
}

// Where whole groups are coded, a token reads its own group raw: a tile lies inside one group.
// `first` gets the first work of each sequence.
std::vector<Work> make_works(const AttentionCall &call, const SequenceBatch &batch,
                             std::vector<size_t> &first) {
    std::vector<Work> works;
    const bool is_raw = codes_whole_groups(call.kv.format);
    const RawPlan plan = is_raw ? plan_raw(batch, call.kv) : RawPlan{};
    for (int64_t i = 0; i < batch.num_sequences; ++i) {
        first.push_back(works.size());
        const int64_t row = batch.query_start[i];
        if (!is_raw) {
            add_tiles(call, batch, i, row, batch.query_start[i + 1] - row, nullptr, works);
            continue;
        }
        const auto end = static_cast<size_t>(plan.first[static_cast<size_t>(i) + 1]);
        for (auto g = static_cast<size_t>(plan.first[static_cast<size_t>(i)]); g < end; ++g) {
            const RawGroup &group = plan.groups[g];
            const int64_t count = group.end_lane - group.first_lane;
            add_tiles(call, batch, i, group.first_row, count, group.raw, works);
        }
    }
    return works;
}

// ---------------------------------------------------------------- shared runs

// Members of a run that compute one token, behind the run.
std::vector<int32_t> readers_of(const SequenceBatch &batch, int64_t run, int64_t end_token) {
    std::vector<int32_t> readers;
    const SharedRuns &runs = batch.shared;
    for (int64_t i = runs.indptr[run]; i < runs.indptr[run + 1]; ++i) {
        const int32_t member = runs.members[i];
        const bool is_one = batch.query_start[member + 1] - batch.query_start[member] == 1;
        if (is_one && batch.context_start[member] >= end_token) readers.push_back(member);
    }
    return readers;
}

SharedWork share(const AttentionCall &call, const SequenceBatch &batch, const int32_t *readers,
                 int64_t count, int head, const std::vector<size_t> &first_work, int64_t first,
                 int64_t end) {
    SharedWork work = {};
    const int together = heads_together(call, 1);
    for (int64_t i = 0; i < count; ++i) {
        work.token_rows.push_back(batch.query_start[readers[i]]);
        work.members.push_back(first_work[static_cast<size_t>(readers[i])] +
                               static_cast<size_t>(head / together));
    }
    work.tile.table = batch.block_ids + batch.indptr[readers[0]];
    work.tile.num_tokens = count;
    work.tile.position = end * kSegmentTokens - 1;
    work.tile.kv_head = head;
    work.tile.num_heads = 1;
    work.first_segment = first;
    work.end_segment = end;
    return work;
}

void mark(Work &work, int64_t first, int64_t end) {
    work.is_shared.resize(static_cast<size_t>(work.num_segments()));
    for (int64_t s = first; s < end; ++s) {
        work.is_shared[static_cast<size_t>(s - work.first_segment)] = true;
    }
}

// Whole segments of each run, for its readers together. Runs that part overlap in no block.
void add_shared(const AttentionCall &call, const SequenceBatch &batch,
                const std::vector<size_t> &first_work, AttentionPlan &plan) {
    if (call.window) return;
    const int64_t most = std::max<int64_t>(2, kSharedRows / heads_each(call));
    for (int64_t run = 0; run < batch.shared.num_runs; ++run) {
        const int64_t first_block = batch.shared.runs[2 * run];
        const int64_t end_block = first_block + batch.shared.runs[2 * run + 1];
        const int64_t begin_token = first_block * call.kv.block_size;
        const int64_t end_token = end_block * call.kv.block_size;
        const int64_t first = (begin_token + kSegmentTokens - 1) / kSegmentTokens;
        const int64_t end = end_token / kSegmentTokens;
        const std::vector<int32_t> readers = readers_of(batch, run, end_token);
        const auto total = static_cast<int64_t>(readers.size());
        if (first >= end || total < 2) continue;
        const int64_t parts = (total + most - 1) / most;
        for (int64_t p = 0; p < parts; ++p) {
            const int64_t from = total * p / parts, count = total * (p + 1) / parts - from;
            for (int head = 0; head < call.kv.num_kv_heads; ++head) {
                plan.shared.push_back(
                    share(call, batch, &readers[static_cast<size_t>(from)], count, head, first_work,
                          first, end));
                for (size_t member : plan.shared.back().members) {
                    mark(plan.works[member], first, end);
                }
            }
        }
    }
    for (SharedWork &work : plan.shared) work.tile.token_rows = work.token_rows.data();
}

// ---------------------------------------------------------------- items

void add_items(const AttentionCall &call, size_t index, bool is_shared, const RowTile &tile,
               int64_t first, int64_t end, int64_t count, std::vector<Item> &items) {
    for (int64_t i = 0; i < count; ++i) {
        const int64_t from = first + (end - first) * i / count;
        const int64_t to = first + (end - first) * (i + 1) / count;
        items.push_back({index, is_shared, from, to, cost_of(call, tile, from, to)});
    }
}

int64_t num_parts(const AttentionCall &call, const RowTile &tile, int64_t first, int64_t end,
                  int64_t most_cost) {
    const int64_t cost = cost_of(call, tile, first, end);
    if (num_threads() == 1 || cost <= most_cost) return 1;
    return std::min(end - first, (cost + most_cost - 1) / most_cost);
}

// Private segments of a work, in pieces; all of them where nothing is shared.
void cut_work(const AttentionCall &call, size_t index, int64_t most_cost, AttentionPlan &plan) {
    Work &work = plan.works[index];
    const size_t before = plan.items.size();
    int64_t first = work.first_segment;
    while (first < work.end_segment) {
        int64_t end = first;
        auto shared = [&](int64_t s) {
            return !work.is_shared.empty() &&
                   work.is_shared[static_cast<size_t>(s - work.first_segment)];
        };
        if (shared(first)) {
            ++first;
            continue;
        }
        while (end < work.end_segment && !shared(end)) ++end;
        const int64_t parts = num_parts(call, work.tile, first, end, most_cost);
        add_items(call, index, false, work.tile, first, end, parts, plan.items);
        first = end;
    }
    work.num_items += static_cast<int64_t>(plan.items.size() - before);
}

void cut_shared(const AttentionCall &call, size_t index, int64_t most_cost, AttentionPlan &plan) {
    const SharedWork &work = plan.shared[index];
    const int64_t segments = work.end_segment - work.first_segment;
    const int64_t parts =
        std::max(num_parts(call, work.tile, work.first_segment, work.end_segment, most_cost),
                 (segments + kSharedSegments - 1) / kSharedSegments);
    add_items(call, index, true, work.tile, work.first_segment, work.end_segment, parts,
              plan.items);
    for (size_t member : work.members) plan.works[member].num_items += parts;
}

// Memory and a counter for each work whose result comes in parts.
void place_partials(const AttentionCall &call, AttentionPlan &plan) {
    int64_t num_floats = 0;
    auto stride = [&](const Work &work) {
        return work.tile.num_heads * kernels().partial_floats(call, rows_of(call, work.tile));
    };
    auto has_parts = [](const Work &work) { return work.num_items > 1 || !work.is_shared.empty(); };
    for (const Work &work : plan.works) {
        if (has_parts(work)) num_floats += work.num_segments() * stride(work);
    }
    float *partials = caller_scratch(num_floats);
    plan.counters = std::make_unique<std::atomic<int64_t>[]>(plan.works.size());
    for (size_t i = 0; i < plan.works.size(); ++i) {
        Work &work = plan.works[i];
        if (!has_parts(work)) continue;
        work.partials = partials;
        partials += work.num_segments() * stride(work);
        work.num_left = &plan.counters[i];
        *work.num_left = work.num_items;
    }
}

int64_t thread_floats(const AttentionCall &call, const AttentionPlan &plan) {
    int64_t num_floats = 0;
    for (const Work &work : plan.works) {
        const int64_t rows = rows_of(call, work.tile);
        num_floats = std::max(
            num_floats, kernels().attention_scratch_floats(call, rows, work.tile.num_heads));
    }
    for (const SharedWork &work : plan.shared) {
        const int64_t rows = rows_of(call, work.tile);
        const int64_t partials = kSharedSegments * kernels().partial_floats(call, rows);
        num_floats =
            std::max(num_floats, kernels().attention_scratch_floats(call, rows, 1) + partials);
    }
    return num_floats;
}

}  // namespace

int64_t rows_of(const AttentionCall &call, const RowTile &tile) {
    return tile.num_tokens * heads_each(call);
}

AttentionPlan plan_attention(const AttentionCall &call, const SequenceBatch &batch) {
    AttentionPlan plan;
    std::vector<size_t> first_work;
    plan.works = make_works(call, batch, first_work);
    add_shared(call, batch, first_work, plan);
    int64_t total = 0;
    for (const Work &work : plan.works) {
        total += cost_of(call, work.tile, work.first_segment, work.end_segment);
    }
    const int64_t most_cost = std::max(kMinItemCost, total / (kItemsPerThread * num_threads()));
    for (size_t i = 0; i < plan.works.size(); ++i) cut_work(call, i, most_cost, plan);
    for (size_t i = 0; i < plan.shared.size(); ++i) cut_shared(call, i, most_cost, plan);
    place_partials(call, plan);
    plan.scratch_floats = thread_floats(call, plan);
    std::stable_sort(plan.items.begin(), plan.items.end(),
                     [](const Item &a, const Item &b) { return a.cost > b.cost; });
    return plan;
}

}  // namespace pagemill
