// A row tile of attention and what its steps share: queries, scores, sums, where K and V lie.
#pragma once

#include <type_traits>

#include "kernels/attention_codes.hpp"
#include "kernels/entry_points.hpp"

namespace pagemill::PAGEMILL_ISA {

constexpr float kLog2E = 1.44269504f;
constexpr int kDirectRows = 8;  // few rows: K and V are fetched and widened where they are used
constexpr int64_t kWeightWords = 2 * kStepTokens / 4 * kQuadWords;  // of a row: two planes

static inline int64_t round_up(int64_t count, int64_t size) {
    return (count + size - 1) / size * size;
}

static inline int64_t partial_size(int64_t num_rows, int64_t dim) {
    return 2 * partial_stride(num_rows) + num_rows * dim;
}

static inline void clear(const Partial &partial, int64_t num_rows, int64_t dim) {
    for (int64_t r = 0; r < num_rows; ++r) {
        partial.m[r] = -__builtin_inff();
        partial.l[r] = 0;
    }
    std::memset(partial.acc, 0, static_cast<size_t>(num_rows * dim) * sizeof(float));
}

// How a format is read: its lines as they are, widened to float32 first, or as bytes.
static inline bool reads_bytes(KvFormat format) {
    return format == KvFormat::kI8 || format == KvFormat::kK8v4 || format == KvFormat::kI4c;
}

// Whether the products of a call run on matrix tiles (attention_amx.hpp).
static inline bool uses_tiles(const AttentionCall &call) {
#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
    if (call.kv.format == KvFormat::kBf16) return call.kv.head_dim % 32 == 0;
    return rotates_k(call.kv.format) && call.kv.head_dim % 64 == 0;
#else
    (void)call;
    return false;
#endif
}

static inline bool must_widen(KvFormat format, bool has_many_rows) {
    return format == KvFormat::kF8 || (has_many_rows && format == KvFormat::kBf16);
}

// Queries and weights as bytes.
struct Codes {
    int32_t *queries, *weights;  // words: [rows][D / 4] (i4c: of a group), [rows][2 planes][16]
    QueryRow *rows;
    float *factors, *added;
};

// All that the steps of a tile share. Token positions count from the start of the sequence; the
// tile reads [begin, end).
struct Tile {
    const AttentionCall *call;
    RowTile rows;  // of one head
    int64_t num_heads_each, num_rows, dim, begin, end;
    bool has_many_rows, widens, is_coded;
    MicroKernels micro;
    float *q, *scores, *lane_sums;  // [rows][D], [rows][64], [rows][16]
    float *shifts;                  // [rows], q . center, added to scores; null: none
    uint8_t *keys, *values;         // a step of K and V as float32, or the last V without its rest
    Codes codes;
    uint16_t *q_tiles, *weight_tiles;  // bf16, high and low parts, on processors with tiles
    Partial partial, total;
};

static inline int64_t heads_each(const AttentionCall &call) {
    return call.num_heads / call.kv.num_kv_heads;
}

// With many rows a step of K and V is used often: it is fetched and widened once. With few, every
// line is fetched ahead and widened where it is used. Raw groups are bf16.
static inline MicroKernels choose(const AttentionCall &call, bool widens, bool has_many_rows) {
    const KvFormat format = call.kv.format;
    if (format == KvFormat::kI4c) return micro_kernels<Bf16Lines, false>();
    if (widens || has_many_rows) return micro_kernels<Fp32Lines, false>();
    if (format == KvFormat::kBf16) return micro_kernels<Bf16Lines, true>();
    return micro_kernels<Fp32Lines, true>();
}

// Hands out pieces of the scratch, each at a 64-byte border.
struct Scratch {
    float *next;
    template <typename T = float>
    T *take(int64_t count) {
        float *here = next;
        next += round_up(count * static_cast<int64_t>(sizeof(T)) / 4, 16);
        return reinterpret_cast<T *>(here);
    }
};

static inline Tile make_tile(const AttentionCall &call, const RowTile &rows, Scratch shared,
                             Scratch own) {
    const int64_t each = heads_each(call), num_rows = rows.num_tokens * each;
    const int64_t dim = call.kv.head_dim;
    const int64_t end = rows.position + (rows.token_rows ? 1 : rows.num_tokens);
    const int64_t begin = call.window ? larger(int64_t{0}, rows.position - call.window + 1) : 0;
    const bool many = num_rows > kDirectRows;
    const bool widens = !uses_tiles(call) && must_widen(call.kv.format, many);
    const bool is_coded = reads_bytes(call.kv.format);
    Tile tile = {};
    tile.call = &call;
    tile.rows = rows;
    tile.num_heads_each = each;
    tile.num_rows = num_rows;
    tile.dim = dim;
    tile.begin = begin;
    tile.end = end;
    tile.has_many_rows = many;
    tile.widens = widens;
    tile.is_coded = is_coded;
    tile.micro = choose(call, widens, many);
    const int64_t whole_rows = round_up(num_rows, 16);
    tile.scores = shared.take(whole_rows * kStepTokens);
    tile.lane_sums = shared.take(num_rows * 16);
    tile.keys = shared.take<uint8_t>(kStepTokens * dim * 4);
    tile.values = shared.take<uint8_t>(kStepTokens * dim * 4);
    tile.codes.weights = shared.take<int32_t>(whole_rows * kWeightWords);
    tile.codes.factors = shared.take(num_rows);
    tile.codes.added = shared.take(num_rows);
    tile.weight_tiles = shared.take<uint16_t>(2 * whole_rows * kStepTokens);
    tile.partial = partial_in(shared.take(partial_size(num_rows, dim)), num_rows);
    tile.q = own.take(num_rows * dim);
    tile.shifts = own.take(num_rows);
    tile.codes.queries = own.take<int32_t>(2 * whole_rows * dim / 4 * kQuadWords);
    tile.codes.rows = own.take<QueryRow>(num_rows);
    tile.q_tiles = own.take<uint16_t>(2 * whole_rows * dim);
    tile.total = partial_in(own.take(partial_size(num_rows, dim)), num_rows);
    return tile;
}

// Floats that the heads of a tile share, and that each needs for itself.
static inline int64_t shared_floats(int64_t num_rows, int64_t dim) {
    const int64_t whole_rows = round_up(num_rows, 16);
    return whole_rows * (2 * kStepTokens + 16 + kWeightWords + 2) + 2 * kStepTokens * dim +
           partial_size(num_rows, dim) + 9 * 16;
}

static inline int64_t own_floats(int64_t num_rows, int64_t dim) {
    const int64_t whole_rows = round_up(num_rows, 16);
    return whole_rows * (dim * (2 + kQuadWords) + 3) + partial_size(num_rows, dim) + 6 * 16;
}

static inline float dot(const float *a, const float *b, int64_t dim) {
    Vec total{};
    for (int64_t i = 0; i < dim; i += kLanes) total = fma(load(a + i), load(b + i), total);
    return sum(total);
}

// q of the tile, times scale and log2(e): the softmax works in powers of two. Rotated as the keys
// are, and as bytes where these are bytes.
//
// Keys lie in the cache minus a center, which adds the same number to all scores of a row: softmax
// does not see it. Where it would - a soft cap, a sink - the number is added back.
static inline void load_queries(Tile &tile) {
    const AttentionCall &call = *tile.call;
    const int64_t dim = tile.dim, width = tile.num_heads_each * dim;
    const float factor = call.softcap > 0 ? call.scale / call.softcap : call.scale * kLog2E;
    const bool shifts = call.kv.centers && (call.softcap > 0 || call.sinks);
    const float *center = shifts ? call.kv.centers + tile.rows.kv_head * dim : nullptr;
    for (int64_t t = 0; t < tile.rows.num_tokens; ++t) {
        const int64_t row =
            tile.rows.token_rows ? tile.rows.token_rows[t] : tile.rows.first_token + t;
        const float *from = call.q + row * call.q_stride + tile.rows.kv_head * width;
        float *to = tile.q + t * width;
        for (int64_t i = 0; i < width; ++i) to[i] = from[i] * factor;
    }
    for (int64_t r = 0; r < tile.num_rows; ++r) {
        float *q = tile.q + r * dim;
        if (shifts) tile.shifts[r] = dot(q, center, dim);
        if (rotates_k(call.kv.format)) {
            hadamard(q, dim);
            int32_t *words = tile.codes.queries + r * dim / 4 * kQuadWords;
            tile.codes.rows[r] = code_query(q, dim, words);
        }
    }
    if (!shifts) tile.shifts = nullptr;
}

// One step: where its groups lie, and what to fetch for later. The last group may be raw.
struct Step {
    int64_t first_token;
    int num_groups, num_coded;
    const uint8_t *meta[kStepGroups], *k[kStepGroups], *v[kStepGroups];
    const uint8_t *meta_ahead[kStepGroups], *k_ahead[kStepGroups], *v_ahead[kStepGroups];
};

static inline const uint8_t *group_of(const Tile &tile, int64_t group) {
    const KvView &kv = tile.call->kv;
    const int64_t in_block = kv.block_size / kGroupTokens;
    return group_at(kv, tile.rows.table[group / in_block], tile.rows.kv_head, group % in_block);
}

static inline Step find_step(const Tile &tile, int64_t first_group, int64_t end_group,
                             int64_t last_group) {
    Step step = {};
    const KvView &kv = tile.call->kv;
    const int64_t distance = tile.is_coded ? 2 * kStepGroups : kStepGroups;
    step.first_token = first_group * kGroupTokens;
    step.num_groups = step.num_coded = static_cast<int>(end_group - first_group);
    for (int b = 0; b < step.num_groups; ++b) {
        const uint8_t *here = group_of(tile, first_group + b);
        const uint8_t *next = group_of(tile, smaller(first_group + b + distance, last_group));
        step.meta[b] = here;
        step.k[b] = here + kv.bytes.meta;
        step.v[b] = here + kv.bytes.meta + kv.bytes.k;
        step.meta_ahead[b] = next;
        step.k_ahead[b] = next + kv.bytes.meta;
        step.v_ahead[b] = next + kv.bytes.meta + kv.bytes.k;
    }
    if (tile.rows.raw && end_group > last_group) {
        const int b = --step.num_coded;
        step.k[b] = tile.rows.raw + tile.rows.kv_head * raw_head_bytes(kv);
        step.v[b] = step.k[b] + group_bytes_of(KvFormat::kBf16, tile.dim).k;
    }
    return step;
}

// The rows in nearly equal parts that fit the register tile: fn(first row, number of rows).
template <typename Fn>
static inline void each_part(int64_t num_rows, int64_t most, Fn fn) {
    const int64_t parts = (num_rows + most - 1) / most;
    for (int64_t i = 0; i < parts; ++i) {
        const int64_t first = num_rows * i / parts, next = num_rows * (i + 1) / parts;
        fn(first, next - first);
    }
}

}  // namespace pagemill::PAGEMILL_ISA
