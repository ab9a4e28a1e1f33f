// Attention of one row tile over a range of its tokens.
//
// Softmax in base 2, in steps of 64 tokens that start at multiples of 64 in the sequence. The
// reference m of a row is not its running maximum: it moves only when a score exceeds it by more
// than 6 (a factor of 64), so rescaling is rare. Every 512 tokens (a segment) the sums start afresh
// and join the total of the segments before. All of this depends on positions alone, never on which
// rows, sequences or threads share the work: a row's result is the same bits in any batch and any
// chunking.
#include "kernels/attention_micro.hpp"
#include "kernels/entry_points.hpp"

namespace pagemill::PAGEMILL_ISA {
namespace {

constexpr float kLog2E = 1.44269504f;
constexpr float kSlack = 6.0f;
constexpr int kDirectRows = 8;  // few rows: K and V are fetched and widened where they are used

int64_t round_up(int64_t count, int64_t size) { return (count + size - 1) / size * size; }

// The sums of a segment, or of all segments so far: of row r the reference m[r], the sum of weights
// l[r] and the weighted sum of values acc[r][D].
struct Partial {
    float *m, *l, *acc;
};

int64_t partial_size(int64_t num_rows, int64_t dim) {
    return 2 * round_up(num_rows, 16) + num_rows * dim;
}

Partial partial_in(float *memory, int64_t num_rows) {
    const int64_t stride = round_up(num_rows, 16);
    return {memory, memory + stride, memory + 2 * stride};
}

void clear(const Partial &partial, int64_t num_rows, int64_t dim) {
    for (int64_t r = 0; r < num_rows; ++r) {
        partial.m[r] = -__builtin_inff();
        partial.l[r] = 0;
    }
    std::memset(partial.acc, 0, static_cast<size_t>(num_rows * dim) * sizeof(float));
}

// All that the steps of a tile share. Token positions count from the start of the sequence; the
// tile reads [begin, end).
struct Tile {
    const AttentionCall &call;
    const RowTile &rows;
    int64_t num_heads_each, num_rows, dim, begin, end;
    bool has_many_rows, widens;
    MicroKernels micro;
    float *q, *scores, *lane_sums;  // [rows][D], [rows][64], [rows][16]
    uint8_t *keys, *values;         // a step of K and V as float32, or the last V without its rest
    Partial partial, total;
};

int64_t heads_each(const AttentionCall &call) { return call.num_heads / call.kv.num_kv_heads; }

// With many rows a step of K and V is used often: it is fetched and widened once. With few, every
// line is fetched ahead and widened where it is used.
MicroKernels choose(const AttentionCall &call, bool has_many_rows) {
    if (has_many_rows) return micro_kernels<Fp32Lines, false>();
    if (call.kv.format == KvFormat::kBf16) return micro_kernels<Bf16Lines, true>();
    return micro_kernels<Fp32Lines, true>();
}

Tile make_tile(const AttentionCall &call, const RowTile &rows, float *scratch) {
    const int64_t each = heads_each(call), num_rows = rows.num_tokens * each;
    const int64_t dim = call.kv.head_dim, end = rows.position + rows.num_tokens;
    const int64_t begin = call.window ? larger(int64_t{0}, rows.position - call.window + 1) : 0;
    const bool many = num_rows > kDirectRows, widens = many && call.kv.format != KvFormat::kFp32;
    Tile tile = {
        call,    rows,    each,    num_rows, dim,     begin, end, many, widens, choose(call, many),
        nullptr, nullptr, nullptr, nullptr,  nullptr, {},    {}};
    tile.q = scratch;
    tile.scores = tile.q + num_rows * dim;
    tile.lane_sums = tile.scores + num_rows * kStepTokens;
    tile.keys = reinterpret_cast<uint8_t *>(tile.lane_sums + num_rows * 16);
    tile.values = tile.keys + kStepTokens * dim * 4;
    float *rest = reinterpret_cast<float *>(tile.values + kStepTokens * dim * 4);
    tile.partial = partial_in(rest, num_rows);
    tile.total = partial_in(rest + partial_size(num_rows, dim), num_rows);
    return tile;
}

// q of the tile, times scale and log2(e): the softmax works in powers of two.
void load_queries(const Tile &tile) {
    const AttentionCall &call = tile.call;
    const float factor = call.softcap > 0 ? call.scale / call.softcap : call.scale * kLog2E;
    const int64_t width = tile.num_heads_each * tile.dim;
    for (int64_t t = 0; t < tile.rows.num_tokens; ++t) {
        const float *from =
            call.q + (tile.rows.first_token + t) * call.q_stride + tile.rows.kv_head * width;
        float *to = tile.q + t * width;
        for (int64_t i = 0; i < width; ++i) to[i] = from[i] * factor;
    }
}

const uint8_t *group_of(const Tile &tile, int64_t group) {
    const KvView &kv = tile.call.kv;
    const int64_t in_block = kv.block_size / kGroupTokens;
    return group_at(kv, tile.rows.table[group / in_block], tile.rows.kv_head, group % in_block);
}

template <typename Lines>
void widen(const uint8_t *from, int64_t num_pairs, uint8_t *to) {
    for (int64_t pair = 0; pair < num_pairs; ++pair) {
        const uint8_t *lines = from + pair * Lines::kPairBytes;
        float *out = reinterpret_cast<float *>(to) + pair * 32;
        store_row(out, Lines::load_even(lines));
        store_row(out + 16, Lines::load_odd(lines));
    }
}

// What lies behind the last token of a tile may be anything, NaN included: its weight is 0, but
// 0 * NaN is not. So V of the last group is copied and its rest cleared.
template <typename Lines>
void clear_rest(uint8_t *values, int64_t dim, int64_t num_tokens) {
    for (int64_t column = 0; column < dim / 16; ++column) {
        uint8_t *lines = values + column * kValuePairs * Lines::kPairBytes;
        for (int64_t t = num_tokens; t < kGroupTokens; ++t) {
            for (int lane = 0; lane < 16; ++lane) {
                Lines::put_one(lines, t / 2, lane, static_cast<int>(t % 2), 0.0f);
            }
        }
    }
}

// One step: where its groups lie, and what to fetch for the next.
struct Step {
    int64_t first_token;
    int num_groups;
    const uint8_t *k[kStepGroups], *v[kStepGroups];
    const uint8_t *k_ahead[kStepGroups], *v_ahead[kStepGroups];
};

Step find_step(const Tile &tile, int64_t first_group, int64_t end_group, int64_t last_group) {
    Step step = {
        first_group * kGroupTokens, static_cast<int>(end_group - first_group), {}, {}, {}, {}};
    for (int b = 0; b < step.num_groups; ++b) {
        const uint8_t *here = group_of(tile, first_group + b);
        const uint8_t *next = group_of(tile, smaller(first_group + b + kStepGroups, last_group));
        step.k[b] = here;
        step.v[b] = here + tile.call.kv.k_bytes;
        step.k_ahead[b] = next;
        step.v_ahead[b] = next + tile.call.kv.k_bytes;
    }
    return step;
}

void fetch_ahead(const Tile &tile, const Step &step) {
    for (int b = 0; b < step.num_groups; ++b) {
        for (int64_t i = 0; i < tile.call.kv.group_bytes; i += 64) prefetch(step.k_ahead[b] + i);
    }
}

// K and V of the step as float32 in the scratch, which the step then reads.
void widen_step(const Tile &tile, Step &step) {
    const int64_t group_floats = kGroupTokens * tile.dim;
    for (int b = 0; b < step.num_groups; ++b) {
        uint8_t *keys = tile.keys + b * group_floats * 4,
                *values = tile.values + b * group_floats * 4;
        widen<Bf16Lines>(step.k[b], tile.dim / 2, keys);
        widen<Bf16Lines>(step.v[b], tile.dim / 2, values);
        step.k[b] = keys;
        step.v[b] = values;
    }
}

void clear_behind_end(const Tile &tile, Step &step) {
    const int last = step.num_groups - 1;
    const int64_t num_tokens = tile.end - step.first_token - last * kGroupTokens;
    if (num_tokens >= kGroupTokens) return;
    const bool is_bf16 = tile.call.kv.format == KvFormat::kBf16 && !tile.widens;
    const int64_t v_bytes = kGroupTokens * tile.dim * (is_bf16 ? 2 : 4);
    uint8_t *copy = tile.values + last * kGroupTokens * tile.dim * 4;
    if (!tile.widens) std::memcpy(copy, step.v[last], static_cast<size_t>(v_bytes));
    if (is_bf16) {
        clear_rest<Bf16Lines>(copy, tile.dim, num_tokens);
    } else {
        clear_rest<Fp32Lines>(copy, tile.dim, num_tokens);
    }
    step.v[last] = copy;
}

// The rows in nearly equal parts that fit the register tile: fn(first row, number of rows).
template <typename Fn>
static inline void each_part(const Tile &tile, Fn fn) {
    const int64_t parts = (tile.num_rows + tile.micro.max_rows - 1) / tile.micro.max_rows;
    for (int64_t i = 0; i < parts; ++i) {
        const int64_t first = tile.num_rows * i / parts, next = tile.num_rows * (i + 1) / parts;
        fn(first, next - first);
    }
}

void score_step(const Tile &tile, const Step &step) {
    const int groups_each =
        tile.has_many_rows ? 1 : step.num_groups;  // few rows: several groups at once
    for (int b = 0; b < step.num_groups; b += groups_each) {
        each_part(tile, [&](int64_t first, int64_t count) {
            tile.micro.score[count](tile.q + first * tile.dim, tile.dim, step.k + b,
                                    step.k_ahead + b, groups_each,
                                    tile.scores + first * kStepTokens + b * kGroupTokens);
        });
    }
}

void value_step(const Tile &tile, const Step &step) {
    const int64_t num_columns = tile.dim / 16, columns_each = tile.has_many_rows ? 1 : num_columns;
    for (int64_t column = 0; column < num_columns; column += columns_each) {
        each_part(tile, [&](int64_t first, int64_t count) {
            tile.micro.value[count](tile.scores + first * kStepTokens, step.v, step.v_ahead,
                                    step.num_groups, column, column + columns_each,
                                    tile.partial.acc + first * tile.dim, tile.dim);
        });
    }
}

// softcap * tanh(s / softcap), in base 2; the division is in q already
void cap_scores(const Tile &tile, int num_groups) {
    const Vec cap = broadcast(tile.call.softcap * kLog2E);
    for (int64_t r = 0; r < tile.num_rows; ++r) {
        float *scores = tile.scores + r * kStepTokens;
        for (int i = 0; i < num_groups * kGroupTokens; i += kLanes) {
            store(scores + i, cap * tanh(load(scores + i)));
        }
    }
}

// Tokens that the row at `position` may not read get -inf.
void mask_row(const Tile &tile, const Step &step, int64_t position, float *scores) {
    const int64_t num_tokens = step.num_groups * kGroupTokens;
    int64_t low = tile.call.window ? position - tile.call.window + 1 - step.first_token : 0;
    int64_t high = position + 1 - step.first_token;
    low = smaller(larger(low, int64_t{0}), num_tokens);
    high = smaller(larger(high, int64_t{0}), num_tokens);
    for (int64_t i = 0; i < low; ++i) scores[i] = -__builtin_inff();
    for (int64_t i = high; i < num_tokens; ++i) scores[i] = -__builtin_inff();
}

void rescale(const Tile &tile, int64_t r, float factor) {
    float *sums = tile.lane_sums + r * 16, *acc = tile.partial.acc + r * tile.dim;
    for (int i = 0; i < 16; i += kLanes) store(sums + i, load(sums + i) * broadcast(factor));
    for (int64_t i = 0; i < tile.dim; i += kLanes)
        store(acc + i, load(acc + i) * broadcast(factor));
}

// Scores of a row to weights 2^(s - m); a row that reads nothing here gets zeros.
void weigh_row(const Tile &tile, int num_groups, int64_t r) {
    float *scores = tile.scores + r * kStepTokens;
    Row best = load_row(scores);
    for (int b = 1; b < num_groups; ++b) {
        const Row row = load_row(scores + b * kGroupTokens);
        for (int i = 0; i < kParts; ++i) best.part[i] = larger(best.part[i], row.part[i]);
    }
    const float top = largest(best);
    float &m = tile.partial.m[r];
    if (top == -__builtin_inff()) {
        std::memset(scores, 0, sizeof(float) * static_cast<size_t>(num_groups * kGroupTokens));
        return;
    }
    if (!(top <= m + kSlack)) {
        rescale(tile, r, exp2(m - top));
        m = top;
    }
    Row sums = load_row(tile.lane_sums + r * 16);
    for (int b = 0; b < num_groups; ++b) {
        for (int i = 0; i < kParts; ++i) {
            float *at = scores + b * kGroupTokens + i * kLanes;
            const Vec weight = exp2(load(at) - broadcast(m));
            sums.part[i] += weight;
            store(at, weight);
        }
    }
    store_row(tile.lane_sums + r * 16, sums);
}

void attend_step(const Tile &tile, int64_t first_group, int64_t end_group, int64_t last_group) {
    Step step = find_step(tile, first_group, end_group, last_group);
    if (tile.has_many_rows) fetch_ahead(tile, step);
    if (tile.widens) widen_step(tile, step);
    clear_behind_end(tile, step);
    score_step(tile, step);
    if (tile.call.softcap > 0) cap_scores(tile, step.num_groups);
    for (int64_t r = 0; r < tile.num_rows; ++r) {
        const int64_t position = tile.rows.position + r / tile.num_heads_each;
        mask_row(tile, step, position, tile.scores + r * kStepTokens);
        weigh_row(tile, step.num_groups, r);
    }
    value_step(tile, step);
}

void attend_segment(const Tile &tile, int64_t segment) {
    constexpr int64_t kSegmentGroups = kSegmentTokens / kGroupTokens;
    clear(tile.partial, tile.num_rows, tile.dim);
    std::memset(tile.lane_sums, 0, static_cast<size_t>(tile.num_rows) * 16 * sizeof(float));
    const int64_t last_group = (tile.end - 1) / kGroupTokens;
    int64_t group = larger(tile.begin / kGroupTokens, segment * kSegmentGroups);
    const int64_t end = smaller(last_group + 1, (segment + 1) * kSegmentGroups);
    while (group < end) {
        const int64_t next = smaller(end, (group / kStepGroups + 1) * kStepGroups);
        attend_step(tile, group, next, last_group);
        group = next;
    }
    for (int64_t r = 0; r < tile.num_rows; ++r) {
        tile.partial.l[r] = sum(load_row(tile.lane_sums + r * 16));
    }
}

// total := total joined with part, the log-sum-exp of both.
void join(const Partial &total, const Partial &part, int64_t num_rows, int64_t dim) {
    for (int64_t r = 0; r < num_rows; ++r) {
        if (part.m[r] == -__builtin_inff()) continue;
        const float m = larger(total.m[r], part.m[r]);
        const float keep = exp2(total.m[r] - m), take = exp2(part.m[r] - m);
        total.m[r] = m;
        total.l[r] = total.l[r] * keep + part.l[r] * take;
        float *to = total.acc + r * dim;
        const float *from = part.acc + r * dim;
        for (int64_t i = 0; i < dim; i += kLanes) {
            const Vec kept = load(to + i) * broadcast(keep);
            store(to + i, fma(load(from + i), broadcast(take), kept));
        }
    }
}

void write_out(const AttentionCall &call, const RowTile &rows, const Partial &total) {
    const int64_t each = heads_each(call), dim = call.kv.head_dim;
    for (int64_t r = 0; r < rows.num_tokens * each; ++r) {
        float *out = call.out + (rows.first_token + r / each) * call.out_stride +
                     (rows.kv_head * each + r % each) * dim;
        const Vec factor = broadcast(1.0f / total.l[r]);
        for (int64_t i = 0; i < dim; i += kLanes) {
            store(out + i, load(total.acc + r * dim + i) * factor);
        }
    }
}

}  // namespace

int64_t partial_floats(const AttentionCall &call, int64_t num_rows) {
    return round_up(partial_size(num_rows, call.kv.head_dim), 16);
}

int64_t attention_scratch_floats(const AttentionCall &call, int64_t num_rows) {
    const int64_t dim = call.kv.head_dim;
    return num_rows * (dim + kStepTokens + 16) + 2 * kStepTokens * dim +
           2 * partial_size(num_rows, dim);
}

void attend(const AttentionCall &call, const RowTile &rows, int64_t first, int64_t end,
            float *partials, float *scratch) {
    Tile tile = make_tile(call, rows, scratch);
    load_queries(tile);
    if (partials) {
        for (int64_t segment = first; segment < end; ++segment) {
            float *memory = partials + (segment - first) * partial_floats(call, tile.num_rows);
            tile.partial = partial_in(memory, tile.num_rows);
            attend_segment(tile, segment);
        }
        return;
    }
    clear(tile.total, tile.num_rows, tile.dim);
    for (int64_t segment = first; segment < end; ++segment) {
        attend_segment(tile, segment);
        join(tile.total, tile.partial, tile.num_rows, tile.dim);
    }
    write_out(call, rows, tile.total);
}

void merge(const AttentionCall &call, const RowTile &rows, float *partials, int64_t count) {
    const int64_t num_rows = rows.num_tokens * heads_each(call);
    const int64_t stride = partial_floats(call, num_rows);
    const Partial total = partial_in(partials, num_rows);
    for (int64_t i = 1; i < count; ++i) {
        join(total, partial_in(partials + i * stride, num_rows), num_rows, call.kv.head_dim);
    }
    write_out(call, rows, total);
}

}  // namespace pagemill::PAGEMILL_ISA
