// Attention of one row tile over a range of its tokens.
//
// Softmax in base 2, in steps of 64 tokens that start at multiples of 64 in the sequence. The
// reference m of a row is not its running maximum: it moves only when a score exceeds it by more
// than 6 (a factor of 64), so rescaling is rare. Every 512 tokens (a segment) the sums start afresh
// and join the total of the segments before. All of this depends on positions alone, never on which
// rows, sequences or threads share the work: a row's result is the same bits in any batch and any
// chunking.
#include "kernels/attention_read.hpp"

namespace pagemill::PAGEMILL_ISA {
namespace {

constexpr float kSlack = 6.0f;

bool has_bf16_tiles(const Tile &tile) { return !tile.is_coded && uses_tiles(*tile.call); }

void score_step(const Tile &tile, const Step &step) {
    if (tile.is_coded) score_coded(tile, step);
    if (has_bf16_tiles(tile)) {
        score_bf16_tiles(tile, step);
    } else {
        score_lines(tile, step, tile.is_coded ? step.num_coded : 0, step.num_groups);
    }
    if (!tile.shifts) return;
    for (int64_t r = 0; r < tile.num_rows; ++r) {
        float *scores = tile.scores + r * kStepTokens;
        for (int i = 0; i < step.num_groups * kGroupTokens; i += kLanes) {
            store(scores + i, load(scores + i) + broadcast(tile.shifts[r]));
        }
    }
}

void value_step(const Tile &tile, const Step &step) {
    if (has_bf16_tiles(tile)) return value_bf16_tiles(tile, step);
    if (tile.is_coded && step.num_coded) value_coded(tile, step);
    const int first = tile.is_coded ? step.num_coded : 0;
    if (first < step.num_groups) value_lines(tile, step, first, step.num_groups);
}

// softcap * tanh(s / softcap), in base 2; the division is in q already
void cap_scores(const Tile &tile, int num_groups) {
    const Vec cap = broadcast(tile.call->softcap * kLog2E);
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
    int64_t low = tile.call->window ? position - tile.call->window + 1 - step.first_token : 0;
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

// The reference of a row moves when a score exceeds it by too much: rare, after the first step.
// False where the row reads nothing here.
bool move_reference(const Tile &tile, int64_t r, const Row &best) {
    const float top = largest(best);
    float &m = tile.partial.m[r];
    if (top == -__builtin_inff()) return false;
    if (!(top <= m + kSlack)) {
        rescale(tile, r, exp2(m - top));
        m = top;
    }
    return true;
}

bool exceeds(const Row &best, float limit) {
    bool found = false;
    for (int i = 0; i < kParts; ++i) found |= any_above(best.part[i], limit);
    return found;
}

// Scores of a row to weights 2^(s - m); a row that reads nothing here gets zeros. kGroups at once.
template <int kGroups>
PAGEMILL_INLINE inline void weigh_groups(const Tile &tile, int64_t r) {
    float *scores = tile.scores + r * kStepTokens;
    Row rows[kGroups];
    unroll<kGroups>([&](auto b) PAGEMILL_INLINE { rows[b] = load_row(scores + b * 16); });
    Row best = rows[0];
    for (int b = 1; b < kGroups; ++b) {
        for (int i = 0; i < kParts; ++i) best.part[i] = larger(best.part[i], rows[b].part[i]);
    }
    const float before = tile.partial.m[r];
    if (before == -__builtin_inff() || exceeds(best, before + kSlack)) {
        if (!move_reference(tile, r, best)) {
            std::memset(scores, 0, sizeof(float) * kGroups * kGroupTokens);
            return;
        }
    }
    const Vec m = broadcast(tile.partial.m[r]);
    Row sums = load_row(tile.lane_sums + r * 16);
    unroll<kGroups>([&](auto b) PAGEMILL_INLINE {
        unroll<kParts>([&](auto i) PAGEMILL_INLINE {
            rows[b].part[i] = exp2(rows[b].part[i] - m);
        });
    });
    for (int b = 0; b < kGroups; ++b) {
        for (int i = 0; i < kParts; ++i) sums.part[i] += rows[b].part[i];
        store_row(scores + b * 16, rows[b]);
    }
    store_row(tile.lane_sums + r * 16, sums);
}

void weigh_rows(const Tile &tile, int num_groups) {
    for (int64_t r = 0; r < tile.num_rows; ++r) {
        switch (num_groups) {
            case 4: weigh_groups<4>(tile, r); break;
            case 3: weigh_groups<3>(tile, r); break;
            case 2: weigh_groups<2>(tile, r); break;
            default: weigh_groups<1>(tile, r);
        }
    }
}

void mask_rows(const Tile &tile, const Step &step) {
    for (int64_t r = 0; r < tile.num_rows; ++r) {
        const int64_t position = tile.rows.position + r / tile.num_heads_each;
        mask_row(tile, step, position, tile.scores + r * kStepTokens);
    }
}

// Whether every row reads every token of a step.
bool is_whole(const Tile &tile, const Step &step) {
    const int64_t last = tile.rows.position + (tile.num_rows - 1) / tile.num_heads_each;
    return step.first_token + step.num_groups * kGroupTokens <= tile.rows.position + 1 &&
           (!tile.call->window || step.first_token >= last - tile.call->window + 1);
}

void attend_step(const Tile &tile, int64_t first_group, int64_t end_group, int64_t last_group) {
    Step step = find_step(tile, first_group, end_group, last_group);
    if (!has_bf16_tiles(tile)) {
        if (tile.widens || (tile.has_many_rows && !tile.is_coded)) fetch_ahead(tile, step);
        if (tile.widens) widen_step(tile, step);
    }
    clear_behind_end(tile, step);
    score_step(tile, step);
    if (tile.call->softcap > 0) cap_scores(tile, step.num_groups);
    if (!is_whole(tile, step)) mask_rows(tile, step);
    weigh_rows(tile, step.num_groups);
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

// A sink takes part of the sum of weights and adds no value.
float weight_of_sum(const AttentionCall &call, const Partial &total, int64_t r, int64_t head) {
    if (!call.sinks) return 1.0f / total.l[r];
    const float sink = call.sinks[head] * kLog2E, m = larger(total.m[r], sink);
    const float keep = exp2(total.m[r] - m);
    return keep / (total.l[r] * keep + exp2(sink - m));
}

void write_out(const AttentionCall &call, const RowTile &rows, const Partial &total) {
    const int64_t each = heads_each(call), dim = call.kv.head_dim;
    for (int64_t r = 0; r < rows.num_tokens * each; ++r) {
        const int64_t head = rows.kv_head * each + r % each;
        float *out = call.out + (rows.first_token + r / each) * call.out_stride + head * dim;
        const Vec factor = broadcast(weight_of_sum(call, total, r, head));
        for (int64_t i = 0; i < dim; i += kLanes) {
            store(out + i, load(total.acc + r * dim + i) * factor);
        }
        if (rotates_v(call.kv.format)) hadamard(out, dim);
    }
}

}  // namespace

int64_t partial_floats(const AttentionCall &call, int64_t num_rows) {
    return round_up(partial_size(num_rows, call.kv.head_dim), 16);
}

int64_t attention_scratch_floats(const AttentionCall &call, int64_t num_rows, int64_t num_heads) {
    const int64_t dim = call.kv.head_dim;
    return shared_floats(num_rows, dim) + num_heads * own_floats(num_rows, dim);
}

void attend(const AttentionCall &call, const RowTile &rows, int64_t first, int64_t end,
            float *partials, float *scratch) {
    const int64_t num_rows = rows.num_tokens * heads_each(call), dim = call.kv.head_dim;
    const int64_t stride = partial_floats(call, num_rows);
    float *own = scratch + shared_floats(num_rows, dim);
    Tile tiles[kHeadsTogether];
    for (int h = 0; h < rows.num_heads; ++h, own += own_floats(num_rows, dim)) {
        RowTile head = rows;
        head.kv_head += h;
        tiles[h] = make_tile(call, head, {scratch}, {own});
        load_queries(tiles[h]);
        clear(tiles[h].total, num_rows, dim);
        if (!has_bf16_tiles(tiles[h])) continue;
        split_rows(tiles[h].q, dim, num_rows, dim, tiles[h].q_tiles);
    }
    const TileRegisters registers(uses_tiles(call));
    for (int64_t segment = first; segment < end; ++segment) {
        for (int h = 0; h < rows.num_heads; ++h) {
            Tile &tile = tiles[h];
            if (partials) {
                tile.partial = partial_in(partials, num_rows);
                partials += stride;
            }
            attend_segment(tile, segment);
            if (!partials) join(tile.total, tile.partial, num_rows, dim);
        }
    }
    if (partials) return;
    for (int h = 0; h < rows.num_heads; ++h) write_out(call, tiles[h].rows, tiles[h].total);
}

void merge(const AttentionCall &call, const RowTile &rows, float *partials, int64_t count) {
    const int64_t num_rows = rows.num_tokens * heads_each(call);
    const int64_t stride = partial_floats(call, num_rows);
    for (int h = 0; h < rows.num_heads; ++h) {
        const Partial total = partial_in(partials + h * stride, num_rows);
        for (int64_t i = 1; i < count; ++i) {
            float *part = partials + (i * rows.num_heads + h) * stride;
            join(total, partial_in(part, num_rows), num_rows, call.kv.head_dim);
        }
        RowTile head = rows;
        head.kv_head += h;
        write_out(call, head, total);
    }
}

}  // namespace pagemill::PAGEMILL_ISA
