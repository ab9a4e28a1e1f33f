// The register tiles of attention: up to kMaxRows query rows against token groups of K and V.
//
// Every score and every output sums its products in one fixed order, one accumulator each, whatever
// the number of rows or groups handled together. So a row's numbers do not depend on its
// neighbours.
#pragma once

#include "kernels/kv_lines.hpp"

namespace pagemill::PAGEMILL_ISA {

// How many rows of 16 fit beside each other in registers: enough independent sums to hide the
// latency of the multiply-add, few enough not to spill.
template <int kRows>
constexpr int side_by_side() {
    constexpr int budget = (kVectorRegisters == 32 ? 24 : 8) / (kRows * kParts);
    return budget >= 4 ? 4 : budget >= 2 ? 2 : 1;
}

// acc[r][column] += factors[r] * row, where the factors lie `stride` floats apart.
template <int kRows, int kColumns>
PAGEMILL_INLINE static inline void add_products(const float *factors, int64_t stride,
                                                const Row &row, Row (&acc)[kRows][kColumns],
                                                int column) {
    unroll<kRows>([&](auto r) PAGEMILL_INLINE {
        const Vec factor = broadcast(factors[r * stride]);
        unroll<kParts>([&](auto i) PAGEMILL_INLINE {
            acc[r][column].part[i] = fma(factor, row.part[i], acc[r][column].part[i]);
        });
    });
}

template <typename Lines, bool kAhead>
PAGEMILL_INLINE static inline void fetch_pair(const uint8_t *lines) {
    if constexpr (kAhead) {
        for (int i = 0; i < Lines::kPairBytes; i += 64) prefetch(lines + i);
    }
}

// scores[r][b * 16 + t] = sum over c of q[r][c] * K[b][c][t]. `ahead` are lines to fetch meanwhile.
template <typename Lines, bool kAhead, int kRows, int kGroups>
static inline void score_tile(const float *q, int64_t dim, const uint8_t *const *k,
                              const uint8_t *const *ahead, float *scores) {
    Row acc[kRows][kGroups];
    unroll<kRows>([&](auto r) PAGEMILL_INLINE {
        unroll<kGroups>([&](auto b) PAGEMILL_INLINE { acc[r][b] = splat_row(0.0f); });
    });
    for (int64_t pair = 0; pair < dim / 2; ++pair) {
        const int64_t offset = pair * Lines::kPairBytes;
        unroll<kGroups>([&](auto b) PAGEMILL_INLINE {
            fetch_pair<Lines, kAhead>(ahead[b] + offset);
            add_products<kRows>(q + 2 * pair, dim, Lines::load_even(k[b] + offset), acc, b);
            add_products<kRows>(q + 2 * pair + 1, dim, Lines::load_odd(k[b] + offset), acc, b);
        });
    }
    unroll<kRows>([&](auto r) PAGEMILL_INLINE {
        unroll<kGroups>([&](auto b) PAGEMILL_INLINE {
            store_row(scores + r * kStepTokens + b * kGroupTokens, acc[r][b]);
        });
    });
}

template <typename Lines, bool kAhead, int kRows>
static void score_rows(const float *q, int64_t dim, const uint8_t *const *k,
                       const uint8_t *const *ahead, int num_groups, float *scores) {
    constexpr int kWide = side_by_side<kRows>();
    int b = 0;
    for (; b + kWide <= num_groups; b += kWide) {
        score_tile<Lines, kAhead, kRows, kWide>(q, dim, k + b, ahead + b,
                                                scores + b * kGroupTokens);
    }
    for (; b < num_groups; ++b) {
        score_tile<Lines, kAhead, kRows, 1>(q, dim, k + b, ahead + b, scores + b * kGroupTokens);
    }
}

// out[r][16 channels each] += sum over tokens of p[r][t] * V[t][channels], tokens in order.
template <typename Lines, bool kAhead, int kRows, int kColumns>
static inline void value_tile(const float *p, const uint8_t *const *v, const uint8_t *const *ahead,
                              int num_groups, int64_t column, float *out, int64_t dim) {
    constexpr int64_t kColumnBytes = kValuePairs * Lines::kPairBytes;
    Row acc[kRows][kColumns];
    unroll<kRows>([&](auto r) PAGEMILL_INLINE {
        unroll<kColumns>([&](auto c) PAGEMILL_INLINE {
            acc[r][c] = load_row(out + r * dim + (column + c) * 16);
        });
    });
    for (int b = 0; b < num_groups; ++b) {
        for (int pair = 0; pair < kValuePairs; ++pair) {
            const float *weights = p + b * kGroupTokens + 2 * pair;
            unroll<kColumns>([&](auto c) PAGEMILL_INLINE {
                const int64_t offset = (column + c) * kColumnBytes + pair * Lines::kPairBytes;
                const uint8_t *lines = v[b] + offset;
                fetch_pair<Lines, kAhead>(ahead[b] + offset);
                add_products<kRows>(weights, kStepTokens, Lines::load_even(lines), acc, c);
                add_products<kRows>(weights + 1, kStepTokens, Lines::load_odd(lines), acc, c);
            });
        }
    }
    unroll<kRows>([&](auto r) PAGEMILL_INLINE {
        unroll<kColumns>([&](auto c) PAGEMILL_INLINE {
            store_row(out + r * dim + (column + c) * 16, acc[r][c]);
        });
    });
}

template <typename Lines, bool kAhead, int kRows>
static void value_rows(const float *p, const uint8_t *const *v, const uint8_t *const *ahead,
                       int num_groups, int64_t first, int64_t end, float *out, int64_t dim) {
    constexpr int kWide = side_by_side<kRows>();
    int64_t column = first;
    for (; column + kWide <= end; column += kWide) {
        value_tile<Lines, kAhead, kRows, kWide>(p, v, ahead, num_groups, column, out, dim);
    }
    for (; column < end; ++column) {
        value_tile<Lines, kAhead, kRows, 1>(p, v, ahead, num_groups, column, out, dim);
    }
}

using ScoreFn = void (*)(const float *, int64_t, const uint8_t *const *, const uint8_t *const *,
                         int, float *);
using ValueFn = void (*)(const float *, const uint8_t *const *, const uint8_t *const *, int,
                         int64_t, int64_t, float *, int64_t);

// The register tiles of one format by number of rows.
struct MicroKernels {
    int max_rows;
    ScoreFn score[7];
    ValueFn value[7];
};

template <typename Lines, bool kAhead>
static MicroKernels micro_kernels() {
    MicroKernels kernels = {Lines::kMaxRows, {}, {}};
    kernels.score[1] = score_rows<Lines, kAhead, 1>;
    kernels.value[1] = value_rows<Lines, kAhead, 1>;
    kernels.score[2] = score_rows<Lines, kAhead, 2>;
    kernels.value[2] = value_rows<Lines, kAhead, 2>;
    if constexpr (Lines::kMaxRows >= 4) {
        kernels.score[3] = score_rows<Lines, kAhead, 3>;
        kernels.value[3] = value_rows<Lines, kAhead, 3>;
        kernels.score[4] = score_rows<Lines, kAhead, 4>;
        kernels.value[4] = value_rows<Lines, kAhead, 4>;
    }
    if constexpr (Lines::kMaxRows >= 6) {
        kernels.score[5] = score_rows<Lines, kAhead, 5>;
        kernels.value[5] = value_rows<Lines, kAhead, 5>;
        kernels.score[6] = score_rows<Lines, kAhead, 6>;
        kernels.value[6] = value_rows<Lines, kAhead, 6>;
    }
    return kernels;
}

}  // namespace pagemill::PAGEMILL_ISA
