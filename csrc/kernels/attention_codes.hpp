// The register tiles of attention over coded K and V: sums of bytes are exact, so no order of them
// matters; what is added in float32 is added in one fixed order, as in attention_micro.hpp.
#pragma once

#include "kernels/attention_micro.hpp"
#include "kernels/bytes.hpp"
#include "kernels/numbers.hpp"

namespace pagemill::PAGEMILL_ISA {

// ---------------------------------------------------------------- queries as bytes

// A row of queries as signed bytes: q = scale * code. `start` is what a sum over K codes with an
// offset of 128 begins with.
struct QueryRow {
    float scale;
    int32_t start;
};

static inline QueryRow code_query(const float *q, int64_t dim, int32_t *words) {
    Vec top{};
    for (int64_t i = 0; i < dim; i += kLanes) {
        const Vec x = load(q + i);
        top = larger(top, larger(x, -x));
    }
    const float most = largest(top);
    const Vec factor = broadcast(most > 0 ? 127.0f / most : 0.0f);
    int32_t sum = 0;
    for (int64_t i = 0; i < dim; i += 16, words += 4 * kQuadWords) {
        IntRow codes;
        for (int p = 0; p < kParts; ++p) codes.part[p] = to_int(load(q + i + p * kLanes) * factor);
        store_quads(words, codes);
        sum += sum_ints(codes);
    }
    return {most / 127.0f, -128 * sum};
}

// ---------------------------------------------------------------- scores

// scores[r][b * 16 + t] = scale[r] * k_scale[b][t] * (start[r] + sum over c of q[r][c] K[b][c][t])
template <int kRows, int kGroups>
static inline void score_byte_tile(const int32_t *words, int64_t quads, const QueryRow *queries,
                                   const uint8_t *const *meta, const uint8_t *const *k,
                                   const uint8_t *const *ahead, float *scores) {
    IntRow acc[kRows][kGroups];
    unroll<kRows>([&](auto r) PAGEMILL_INLINE {
        unroll<kGroups>([&](auto b) PAGEMILL_INLINE { acc[r][b] = splat_int(queries[r].start); });
    });
    const int64_t stride = quads * kQuadWords;
    for (int64_t i = 0; i < quads; ++i) {
        ByteRow lines[kGroups];
        unroll<kGroups>([&](auto b) PAGEMILL_INLINE {
            prefetch(ahead[b] + i * 64);
            lines[b] = load_bytes(k[b] + i * 64);
        });
        unroll<kRows>([&](auto r) PAGEMILL_INLINE {
            const Quad quad = load_quad(words + r * stride + i * kQuadWords);
            unroll<kGroups>([&](auto b) PAGEMILL_INLINE {
                unroll<kParts>([&](auto p) PAGEMILL_INLINE {
                    acc[r][b].part[p] = dot_unsigned(acc[r][b].part[p], lines[b].part[p], quad);
                });
            });
        });
    }
    unroll<kGroups>([&](auto b) PAGEMILL_INLINE {
        const Row k_scale = load_f16_row(meta[b]);
        unroll<kRows>([&](auto r) PAGEMILL_INLINE {
            Row row;
            for (int p = 0; p < kParts; ++p) {
                row.part[p] =
                    to_float(acc[r][b].part[p]) * broadcast(queries[r].scale) * k_scale.part[p];
            }
            store_row(scores + r * kStepTokens + b * kGroupTokens, row);
        });
    });
}

// One group of i4c: the scale of each channel goes into q, which is coded anew for the group, in 15
// bits as 128 high + low, and the minima add q . min to all its tokens. folded: [kRows][high, low]
// [quads][words]; added: [kRows].
template <int kRows>
static inline void fold_queries(const float *q, int64_t dim, const uint8_t *meta, int32_t *folded,
                                float *scale, float *added) {
    float scaled[kRows * kMaxHeadDim];
    Row tops[kRows], dots[kRows];
    for (int r = 0; r < kRows; ++r) tops[r] = dots[r] = splat_row(0.0f);
    for (int64_t c = 0; c < dim; c += 16) {
        const Row low = load_f16_row(meta + dim + 2 * c);
        for (int p = 0; p < kParts; ++p) {
            const Vec factor = scale_of_bytes(load_byte_lanes(meta + c + p * kLanes));
            unroll<kRows>([&](auto r) PAGEMILL_INLINE {
                const Vec x = load(q + r * dim + c + p * kLanes), y = x * factor;
                store(scaled + r * dim + c + p * kLanes, y);
                tops[r].part[p] = larger(tops[r].part[p], larger(y, -y));
                dots[r].part[p] = fma(x, low.part[p], dots[r].part[p]);
            });
        }
    }
    Vec factors[kRows];
    for (int r = 0; r < kRows; ++r) {
        const float most = largest(tops[r]);
        added[r] = sum(dots[r]);
        scale[r] = most / 16256.0f;
        factors[r] = broadcast(most > 0 ? 16256.0f / most : 0.0f);
    }
    const int64_t stride = dim / 4 * kQuadWords;
    for (int64_t c = 0; c < dim; c += 16) {
        IntRow codes[kRows];
        for (int p = 0; p < kParts; ++p) {
            unroll<kRows>([&](auto r) PAGEMILL_INLINE {
                codes[r].part[p] = to_int(load(scaled + r * dim + c + p * kLanes) * factors[r]);
            });
        }
        for (int r = 0; r < kRows; ++r) {
            IntRow high, low;
            for (int p = 0; p < kParts; ++p) {
                high.part[p] = (codes[r].part[p] + 64) >> 7;
                low.part[p] = codes[r].part[p] - (high.part[p] << 7);
            }
            int32_t *words = folded + 2 * r * stride + c / 4 * kQuadWords;
            store_quads(words, high);
            store_quads(words + stride, low);
        }
    }
}

template <int kRows>
static inline void score_nibble_group(const float *q, int64_t dim, const uint8_t *meta,
                                      const uint8_t *k, const uint8_t *ahead, int32_t *folded,
                                      float *scores) {
    float scale[kRows], added[kRows];
    fold_queries<kRows>(q, dim, meta, folded, scale, added);
    IntRow upper[kRows], lower[kRows];
    for (int r = 0; r < kRows; ++r) upper[r] = lower[r] = splat_int(0);
    const int64_t stride = dim / 4 * kQuadWords;
    for (int64_t i = 0; i < dim / 8; ++i) {
        prefetch(ahead + i * 64);
        const ByteRow line = load_bytes(k + i * 64);
        unroll<kRows>([&](auto r) PAGEMILL_INLINE {
            const int32_t *words = folded + 2 * r * stride + 2 * i * kQuadWords;
            unroll<kParts>([&](auto p) PAGEMILL_INLINE {
                const BitVec first = line.part[p] & 0x0f0f0f0fu;
                const BitVec second = line.part[p] >> 4 & 0x0f0f0f0fu;
                IntVec &a = upper[r].part[p], &b = lower[r].part[p];
                a = dot_unsigned(a, first, load_quad(words));
                b = dot_unsigned(b, first, load_quad(words + stride));
                a = dot_unsigned(a, second, load_quad(words + kQuadWords));
                b = dot_unsigned(b, second, load_quad(words + stride + kQuadWords));
            });
        });
    }
    for (int r = 0; r < kRows; ++r) {
        Row row;
        for (int p = 0; p < kParts; ++p) {
            const IntVec total = (upper[r].part[p] << 7) + lower[r].part[p];
            row.part[p] = fma(to_float(total), broadcast(scale[r]), broadcast(added[r]));
        }
        store_row(scores + r * kStepTokens, row);
    }
}

// ---------------------------------------------------------------- weights as bytes

// The weights of a step times the scales of V, as 16 bits: weight = factor * (256 high + low).
// words: [2 planes][16 quads][kQuadWords], high first.
static inline float code_weights(const float *weights, const Row *scales, int num_groups,
                                 int32_t *words) {
    Row row[kStepGroups], top = splat_row(0.0f);
    for (int b = 0; b < num_groups; ++b) {
        const Row weight = load_row(weights + b * 16);
        for (int p = 0; p < kParts; ++p) {
            // a token that is not read may have any scale, NaN included
            const Vec product = weight.part[p] * scales[b].part[p];
            const Vec used = weight.part[p] > Vec{} ? product : Vec{};
            row[b].part[p] = used;
            const IntVec bits = reinterpret_cast<IntVec>(used);
            const IntVec best = reinterpret_cast<IntVec>(top.part[p]);
            top.part[p] = reinterpret_cast<Vec>(bits > best ? bits : best);
        }
    }
    const float most = largest_or_nan(top);
    if (most == 0.0f) return 0.0f;
    const Vec factor = broadcast(65535.0f / most);
    constexpr int kPlane = kStepTokens / 4 * kQuadWords;
    for (int b = 0; b < num_groups; ++b) {
        IntRow high, low;
        for (int p = 0; p < kParts; ++p) {
            const IntVec code = to_int(row[b].part[p] * factor);
            high.part[p] = code >> 8 & 255;
            low.part[p] = code & 255;
        }
        store_quads(words + b * 4 * kQuadWords, high);
        store_quads(words + kPlane + b * 4 * kQuadWords, low);
    }
    return most / 65535.0f;
}

// What a row of weights adds to every channel of a plane: the sum of weight * minimum.
static inline float weighed_minima(const float *weights, const Row *minima, int num_groups) {
    Row total = splat_row(0.0f);
    for (int b = 0; b < num_groups; ++b) {
        const Row weight = load_row(weights + b * 16);
        for (int p = 0; p < kParts; ++p) {
            const Vec product = weight.part[p] * minima[b].part[p];
            total.part[p] += weight.part[p] > Vec{} ? product : Vec{};
        }
    }
    return sum(total);
}

// ---------------------------------------------------------------- values

// out[r][16 channels each] += factor[r] * sum over tokens of code[r][t] * V[t] + added[r].
// V as bytes (4 lines of 16 channels a group) or nibbles (2 lines).
template <bool kNibbles, int kRows, int kColumns>
static inline void value_byte_tile(const int32_t *words, const float *factors, const float *added,
                                   const uint8_t *const *v, const uint8_t *const *ahead,
                                   int num_groups, int64_t column, float *out, int64_t dim) {
    constexpr int kPlane = kStepTokens / 4 * kQuadWords;
    constexpr int64_t kLines = kNibbles ? 2 : 4;
    IntRow high[kRows][kColumns], low[kRows][kColumns];
    unroll<kRows>([&](auto r) PAGEMILL_INLINE {
        unroll<kColumns>(
            [&](auto c) PAGEMILL_INLINE { high[r][c] = low[r][c] = splat_int(0); });
    });
    auto add = [&](const ByteRow(&lines)[kColumns], int64_t quad) PAGEMILL_INLINE {
        unroll<kRows>([&](auto r) PAGEMILL_INLINE {
            const int32_t *at = words + r * 2 * kPlane + quad * kQuadWords;
            const Quad upper = load_quad(at), lower = load_quad(at + kPlane);
            unroll<kColumns>([&](auto c) PAGEMILL_INLINE {
                unroll<kParts>([&](auto p) PAGEMILL_INLINE {
                    high[r][c].part[p] = dot_signed(high[r][c].part[p], lines[c].part[p], upper);
                    low[r][c].part[p] = dot_signed(low[r][c].part[p], lines[c].part[p], lower);
                });
            });
        });
    };
    for (int b = 0; b < num_groups; ++b) {
        for (int64_t i = 0; i < kLines; ++i) {
            ByteRow lines[kColumns];
            unroll<kColumns>([&](auto c) PAGEMILL_INLINE {
                const int64_t offset = ((column + c) * kLines + i) * 64;
                prefetch(ahead[b] + offset);
                lines[c] = load_bytes(v[b] + offset);
            });
            if constexpr (kNibbles) {
                ByteRow part[kColumns];
                unroll<kColumns>([&](auto c) PAGEMILL_INLINE {
                    for (int p = 0; p < kParts; ++p) {
                        part[c].part[p] = lines[c].part[p] & 0x0f0f0f0fu;
                    }
                });
                add(part, b * 4 + i);
                unroll<kColumns>([&](auto c) PAGEMILL_INLINE {
                    for (int p = 0; p < kParts; ++p) {
                        part[c].part[p] = lines[c].part[p] >> 4 & 0x0f0f0f0fu;
                    }
                });
                add(part, b * 4 + i + 2);
            } else {
                add(lines, b * 4 + i);
            }
        }
    }
    unroll<kRows>([&](auto r) PAGEMILL_INLINE {
        unroll<kColumns>([&](auto c) PAGEMILL_INLINE {
            float *at = out + r * dim + (column + c) * 16;
            for (int p = 0; p < kParts; ++p) {
                const IntVec total = (high[r][c].part[p] << 8) + low[r][c].part[p];
                Vec sum = fma(to_float(total), broadcast(factors[r]), load(at + p * kLanes));
                if constexpr (kNibbles) sum += broadcast(added[r]);
                store(at + p * kLanes, sum);
            }
        });
    });
}

// ---------------------------------------------------------------- by number of rows

constexpr int kCodedRows = kVectorRegisters == 32 ? 6 : 2;

template <int kRows>
static void score_bytes(const int32_t *words, int64_t quads, const QueryRow *queries,
                        const uint8_t *const *meta, const uint8_t *const *k,
                        const uint8_t *const *ahead, int num_groups, float *scores) {
    constexpr int kWide = side_by_side<kRows>();
    int b = 0;
    for (; b + kWide <= num_groups; b += kWide) {
        score_byte_tile<kRows, kWide>(words, quads, queries, meta + b, k + b, ahead + b,
                                      scores + b * kGroupTokens);
    }
    for (; b < num_groups; ++b) {
        score_byte_tile<kRows, 1>(words, quads, queries, meta + b, k + b, ahead + b,
                                  scores + b * kGroupTokens);
    }
}

template <bool kNibbles, int kRows>
static void value_bytes(const int32_t *words, const float *factors, const float *added,
                        const uint8_t *const *v, const uint8_t *const *ahead, int num_groups,
                        int64_t first, int64_t end, float *out, int64_t dim) {
    constexpr int kWide = side_by_side<2 * kRows>();
    int64_t column = first;
    for (; column + kWide <= end; column += kWide) {
        value_byte_tile<kNibbles, kRows, kWide>(words, factors, added, v, ahead, num_groups,
                                                column, out, dim);
    }
    for (; column < end; ++column) {
        value_byte_tile<kNibbles, kRows, 1>(words, factors, added, v, ahead, num_groups, column,
                                            out, dim);
    }
}

}  // namespace pagemill::PAGEMILL_ISA
