// How a step reads K and V, by format: scores from keys, sums from values.
#pragma once

#include "kernels/attention_amx.hpp"

namespace pagemill::PAGEMILL_ISA {

// ---------------------------------------------------------------- float32 and bf16 lines

template <typename Lines>
static void widen_lines(const uint8_t *from, int64_t num_pairs, uint8_t *to) {
    for (int64_t pair = 0; pair < num_pairs; ++pair) {
        const uint8_t *lines = from + pair * Lines::kPairBytes;
        float *out = reinterpret_cast<float *>(to) + pair * 32;
        store_row(out, Lines::load_even(lines));
        store_row(out + 16, Lines::load_odd(lines));
    }
}

// e4m3 K and V of a group to the lines of float32.
static inline void widen_f8(const uint8_t *meta, const uint8_t *k, const uint8_t *v, int64_t dim,
                            float *keys, float *values) {
    const Row k_scale = load_f16_row(meta), v_scale = load_f16_row(meta + 32);
    float scales[16];
    store_row(scales, v_scale);
    for (int64_t quad = 0; quad < dim / 4; ++quad) {
        const ByteRow key = load_bytes(k + quad * 64), value = load_bytes(v + quad * 64);
        for (int byte = 0; byte < 4; ++byte) {
            const int64_t token = quad % 4 * 4 + byte;
            Row key_row, value_row;
            for (int p = 0; p < kParts; ++p) {
                const BitVec k_code = key.part[p] >> (8 * byte) & 255u;
                const BitVec v_code = value.part[p] >> (8 * byte) & 255u;
                key_row.part[p] = from_e4m3(k_code) * k_scale.part[p];
                value_row.part[p] = from_e4m3(v_code) * broadcast(scales[token]);
            }
            store_row(keys + (quad * 4 + byte) * 16, key_row);
            store_row(values + (quad / 4 * 16 + token) * 16, value_row);
        }
    }
}

// K and V of the step as float32 in the scratch, which the step then reads.
static inline void widen_step(const Tile &tile, Step &step) {
    const int64_t group_floats = kGroupTokens * tile.dim;
    for (int b = 0; b < step.num_groups; ++b) {
        uint8_t *keys = tile.keys + b * group_floats * 4,
                *values = tile.values + b * group_floats * 4;
        if (tile.call->kv.format == KvFormat::kF8) {
            widen_f8(step.meta[b], step.k[b], step.v[b], tile.dim,
                     reinterpret_cast<float *>(keys), reinterpret_cast<float *>(values));
        } else {
            widen_lines<Bf16Lines>(step.k[b], tile.dim / 2, keys);
            widen_lines<Bf16Lines>(step.v[b], tile.dim / 2, values);
        }
        step.k[b] = keys;
        step.v[b] = values;
    }
}

// What lies behind the last token of a tile may be anything, NaN included: its weight is 0, but
// 0 * NaN is not. So V of the last group is copied and its rest cleared. (Bytes need none of this.)
template <typename Lines>
static void clear_rest(uint8_t *values, int64_t dim, int64_t num_tokens) {
    for (int64_t column = 0; column < dim / 16; ++column) {
        uint8_t *lines = values + column * kValuePairs * Lines::kPairBytes;
        for (int64_t t = num_tokens; t < kGroupTokens; ++t) {
            for (int lane = 0; lane < 16; ++lane) {
                Lines::put_one(lines, t / 2, lane, static_cast<int>(t % 2), 0.0f);
            }
        }
    }
}

static inline void clear_behind_end(const Tile &tile, Step &step) {
    const int last = step.num_groups - 1;
    const int64_t num_tokens = tile.end - step.first_token - last * kGroupTokens;
    if (num_tokens >= kGroupTokens || last < (tile.is_coded ? step.num_coded : 0)) return;
    const KvFormat format = tile.call->kv.format;
    const bool is_bf16 = !tile.widens && format != KvFormat::kFp32;
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

static inline void fetch_ahead(const Tile &tile, const Step &step) {
    for (int b = 0; b < step.num_groups; ++b) {
        for (int64_t i = 0; i < tile.call->kv.group_bytes; i += 64) {
            prefetch(step.meta_ahead[b] + i);
        }
    }
}

static inline void score_lines(const Tile &tile, const Step &step, int first, int end) {
    const int each = tile.has_many_rows ? 1 : end - first;  // few rows: several groups at once
    for (int b = first; b < end; b += each) {
        each_part(tile.num_rows, tile.micro.max_rows, [&](int64_t row, int64_t count) {
            tile.micro.score[count](tile.q + row * tile.dim, tile.dim, step.k + b,
                                    step.k_ahead + b, each,
                                    tile.scores + row * kStepTokens + b * kGroupTokens);
        });
    }
}

static inline void value_lines(const Tile &tile, const Step &step, int first, int end) {
    const int64_t num_columns = tile.dim / 16, columns_each = tile.has_many_rows ? 1 : num_columns;
    for (int64_t column = 0; column < num_columns; column += columns_each) {
        each_part(tile.num_rows, tile.micro.max_rows, [&](int64_t row, int64_t count) {
            tile.micro.value[count](tile.scores + row * kStepTokens + first * kGroupTokens,
                                    step.v + first, step.v_ahead + first, end - first, column,
                                    column + columns_each, tile.partial.acc + row * tile.dim,
                                    tile.dim);
        });
    }
}

// ---------------------------------------------------------------- bytes

// fn(Index) with the number of rows as a constant.
template <typename Fn>
static inline void with_rows(int64_t count, Fn fn) {
    switch (count) {
        case 1: return fn(std::integral_constant<int, 1>{});
        case 2: return fn(std::integral_constant<int, 2>{});
        case 3:
            if constexpr (kCodedRows >= 3) return fn(std::integral_constant<int, 3>{});
            return;
        case 4:
            if constexpr (kCodedRows >= 4) return fn(std::integral_constant<int, 4>{});
            return;
        case 5:
            if constexpr (kCodedRows >= 5) return fn(std::integral_constant<int, 5>{});
            return;
        case 6:
            if constexpr (kCodedRows >= 6) return fn(std::integral_constant<int, 6>{});
            return;
    }
}

// With few rows a tile product is mostly empty: vectors are faster, and the bits are the same.
static inline bool has_byte_tiles(const Tile &tile) {
    return tile.has_many_rows && uses_tiles(*tile.call);
}

static inline void fetch_meta(const Tile &tile, const Step &step) {
    for (int b = 0; b < step.num_coded; ++b) {
        for (int64_t i = 0; i < tile.call->kv.bytes.meta; i += 64) {
            prefetch(step.meta_ahead[b] + i);
        }
    }
}

static inline void score_coded(const Tile &tile, const Step &step) {
    const int64_t dim = tile.dim, stride = dim / 4 * kQuadWords;
    const bool is_i4c = tile.call->kv.format == KvFormat::kI4c;
    fetch_meta(tile, step);
    if (has_byte_tiles(tile)) return score_byte_tiles(tile, step);
    const int each = is_i4c || tile.has_many_rows ? 1 : step.num_coded;
    for (int b = 0; b < step.num_coded; b += each) {
        each_part(tile.num_rows, kCodedRows, [&](int64_t row, int64_t count) {
            float *scores = tile.scores + row * kStepTokens + b * kGroupTokens;
            int32_t *words = tile.codes.queries + row * (is_i4c ? 2 * stride : stride);
            with_rows(count, [&](auto rows) {
                if (is_i4c) {
                    score_nibble_group<rows()>(tile.q + row * dim, dim, step.meta[b], step.k[b],
                                               step.k_ahead[b], words, scores);
                } else {
                    score_bytes<rows()>(words, dim / 4, tile.codes.rows + row, step.meta + b,
                                        step.k + b, step.k_ahead + b, each, scores);
                }
            });
        });
    }
}

template <bool kNibbles>
static void value_columns(const Tile &tile, const Step &step, int64_t first, int64_t end) {
    if (has_byte_tiles(tile)) return value_byte_tiles<kNibbles>(tile, step, first, end);
    const int64_t columns_each = tile.has_many_rows ? 2 : end - first;
    for (int64_t column = first; column < end; column += columns_each) {
        const int64_t next = smaller(end, column + columns_each);
        each_part(tile.num_rows, kCodedRows, [&](int64_t row, int64_t count) {
            with_rows(count, [&](auto rows) {
                value_bytes<kNibbles, rows()>(
                    tile.codes.weights + row * kWeightWords, tile.codes.factors + row,
                    tile.codes.added + row, step.v, step.v_ahead, step.num_coded, column, next,
                    tile.partial.acc + row * tile.dim, tile.dim);
            });
        });
    }
}

static inline void value_coded(const Tile &tile, const Step &step) {
    const KvFormat format = tile.call->kv.format;
    Row scales[kStepGroups], minima[kStepGroups];
    if (format == KvFormat::kI8) {
        for (int b = 0; b < step.num_coded; ++b) scales[b] = load_f16_row(step.meta[b] + 32);
        for (int64_t r = 0; r < tile.num_rows; ++r) {
            tile.codes.factors[r] = code_weights(tile.scores + r * kStepTokens, scales,
                                                 step.num_coded,
                                                 tile.codes.weights + r * kWeightWords);
        }
        return value_columns<false>(tile, step, 0, tile.dim / 16);
    }
    const int64_t before = format == KvFormat::kI4c ? i4c_key_meta(tile.dim) : 64;
    for (int64_t plane = 0; plane < num_planes(tile.dim); ++plane) {
        for (int b = 0; b < step.num_coded; ++b) {
            const uint8_t *line = step.meta[b] + before + plane * 64;
            scales[b] = load_f16_row(line);
            minima[b] = load_f16_row(line + 32);
        }
        for (int64_t r = 0; r < tile.num_rows; ++r) {
            const float *weights = tile.scores + r * kStepTokens;
            tile.codes.factors[r] = code_weights(weights, scales, step.num_coded,
                                                 tile.codes.weights + r * kWeightWords);
            tile.codes.added[r] = weighed_minima(weights, minima, step.num_coded);
        }
        value_columns<true>(tile, step, plane * 4, smaller(tile.dim / 16, plane * 4 + 4));
    }
}

}  // namespace pagemill::PAGEMILL_ISA
