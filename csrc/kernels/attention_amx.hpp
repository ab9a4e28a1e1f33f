// Attention over a step on processors with matrix tiles (AMX). K and V lie in the cache as the
// second factor of a tile product wants them, V once the groups of a step stand together.
//
//     scores   [16 rows][32 channels or 64 codes]  x  K [pairs or quads of channels][16 tokens]
//     values   [16 rows][32 tokens or 64]          x  V [pairs or quads of tokens][16 channels]
//
// bf16: queries and weights are split into two bfloat16 each, x = high + low + 2^-18 |x|, and both
// are multiplied. Bytes: the sums are exact, the same bits as without tiles. A row's sums have one
// order, whatever rows stand beside it. Tiles always have 16 rows; what lies behind the last row is
// computed and not read.
#pragma once

#include "kernels/attention_tile.hpp"
#include "kernels/tile_registers.hpp"

namespace pagemill::PAGEMILL_ISA {

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)

constexpr int64_t kSplitTile = 2 * kTileSide * 32;  // bf16 values of a tile: high part, low part

static inline int64_t num_row_tiles(const Tile &tile) {
    return (tile.num_rows + kTileSide - 1) / kTileSide;
}

// 32 floats as two rows of bf16: `high`, and `low` 512 values behind it.
static inline void split_32(const float *x, uint16_t *high) {
    const __m512 a = load(x), b = load(x + 16);
    const __m512bh top = _mm512_cvtne2ps_pbh(b, a);
    const __m512i bits = (__m512i)top;
    __m256i halves[2];
    std::memcpy(halves, &bits, sizeof bits);
    auto wide = [](__m256i half) {
        return (__m512)_mm512_maskz_slli_epi32(
            0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, half), 16);
    };
    const __m512 top_a = wide(halves[0]), top_b = wide(halves[1]);
    const __m512bh rest = _mm512_cvtne2ps_pbh(b - top_b, a - top_a);
    std::memcpy(high, &top, sizeof top);
    std::memcpy(high + kTileSide * 32, &rest, sizeof rest);
}

// Rows [num_rows][width] of floats, `stride` apart, to tiles [row tiles][width / 32][2][16][32].
static inline void split_rows(const float *rows, int64_t stride, int64_t num_rows, int64_t width,
                              uint16_t *tiles) {
    const int64_t num_tiles = width / 32;
    for (int64_t r = 0; r < num_rows; ++r) {
        uint16_t *row = tiles + r / 16 * num_tiles * kSplitTile + r % 16 * 32;
        for (int64_t i = 0; i < num_tiles; ++i) {
            split_32(rows + r * stride + 32 * i, row + i * kSplitTile);
        }
    }
}

// ---------------------------------------------------------------- scores

// The lines of a tile that is read later, between the products: all at once would fill the queue.
static inline void fetch_lines(bool is_first, const uint8_t *lines) {
    for (int64_t i = 0; is_first && i < 16; ++i) prefetch(lines + i * 64);
}

// A product takes some 50 cycles, and the next can start after 16: the four groups of a step, or
// four columns of V, are summed side by side in registers 0 to 3.
#define PAGEMILL_FOUR(count, use)     \
    do {                              \
        use(0);                       \
        if ((count) > 1) { use(1); }  \
        if ((count) > 2) { use(2); }  \
        if ((count) > 3) { use(3); }  \
    } while (0)

static inline void score_bf16_tiles(const Tile &tile, const Step &step) {
    const int64_t depth = tile.dim / 32;
    for (int64_t t = 0; t < num_row_tiles(tile); ++t) {
        const uint16_t *q = tile.q_tiles + t * depth * kSplitTile;
        float *scores = tile.scores + t * 16 * kStepTokens;
#define PAGEMILL_CLEAR(b) _tile_zero(b)
#define PAGEMILL_ADD(b)                                      \
    fetch_lines(t == 0, step.k_ahead[b] + i * 1024);         \
    _tile_loadd(6, step.k[b] + i * 1024, kTileBytes);        \
    _tile_dpbf16ps(b, 4, 6);                                 \
    _tile_dpbf16ps(b, 5, 6)
#define PAGEMILL_STORE(b) _tile_stored(b, scores + (b) * kGroupTokens, kStepTokens * 4)
        PAGEMILL_FOUR(step.num_groups, PAGEMILL_CLEAR);
        for (int64_t i = 0; i < depth; ++i) {
            _tile_loadd(4, q + i * kSplitTile, kTileBytes);
            _tile_loadd(5, q + i * kSplitTile + kSplitTile / 2, kTileBytes);
            PAGEMILL_FOUR(step.num_groups, PAGEMILL_ADD);
        }
        PAGEMILL_FOUR(step.num_groups, PAGEMILL_STORE);
#undef PAGEMILL_ADD
#undef PAGEMILL_STORE
    }
}

// Sums of 16 rows of a step to scores, in the order of score_byte_tile.
static inline void scale_sums(const Tile &tile, const Step &step, int64_t first_row,
                              const int32_t *sums) {
    Row k_scale[kStepGroups];
    for (int b = 0; b < step.num_coded; ++b) k_scale[b] = load_f16_row(step.meta[b]);
    const int64_t end = smaller(tile.num_rows, first_row + kTileSide);
    for (int64_t r = first_row; r < end; ++r) {
        const QueryRow &query = tile.codes.rows[r];
        for (int b = 0; b < step.num_coded; ++b) {
            IntVec sum;
            std::memcpy(&sum, sums + (r - first_row) * kStepTokens + b * 16, sizeof sum);
            const Vec score = to_float(sum + query.start) * broadcast(query.scale);
            store(tile.scores + r * kStepTokens + b * 16, score * k_scale[b].part[0]);
        }
    }
}

static inline void score_byte_tiles(const Tile &tile, const Step &step) {
    const int64_t depth = tile.dim / 64;
    alignas(64) int32_t sums[kTileSide * kStepTokens];
    for (int64_t t = 0; t < num_row_tiles(tile); ++t) {
        const auto *q = reinterpret_cast<const uint8_t *>(tile.codes.queries) + t * 16 * tile.dim;
#define PAGEMILL_ADD(b)                               \
    fetch_lines(t == 0, step.k_ahead[b] + i * 1024);  \
    _tile_loadd(6, step.k[b] + i * 1024, kTileBytes); \
    _tile_dpbsud(b, 4, 6)
#define PAGEMILL_STORE(b) _tile_stored(b, sums + (b) * kGroupTokens, kStepTokens * 4)
        PAGEMILL_FOUR(step.num_coded, PAGEMILL_CLEAR);
        for (int64_t i = 0; i < depth; ++i) {
            _tile_loadd(4, q + i * 64, tile.dim);
            PAGEMILL_FOUR(step.num_coded, PAGEMILL_ADD);
        }
        PAGEMILL_FOUR(step.num_coded, PAGEMILL_STORE);
#undef PAGEMILL_ADD
#undef PAGEMILL_STORE
        scale_sums(tile, step, t * 16, sums);
    }
}

// ---------------------------------------------------------------- values

// A step may begin and end inside its 64 tokens, where a window does. Sums in float32 depend on
// which tokens stand in one tile, so every group has the place of the four that its position gives.
static inline int first_place(const Step &step) {
    return static_cast<int>(step.first_token / kGroupTokens % kStepGroups);
}

// V of a step with its groups together: [columns][2 halves][16 token pairs][16][2] of bf16, zeros
// where a group is missing.
static inline void gather_pairs(const Tile &tile, const Step &step, uint8_t *together) {
    const int first = first_place(step);
    for (int64_t c = 0; c < tile.dim / 16; ++c) {
        for (int place = 0; place < kStepGroups; ++place) {
            uint8_t *to = together + (c * kStepGroups + place) * kValuePairs * 64;
            const int b = place - first;
            if (b < 0 || b >= step.num_groups) {
                std::memset(to, 0, kValuePairs * 64);
                continue;
            }
            const int64_t offset = c * kValuePairs * 64;
            for (int line = 0; line < kValuePairs; ++line) {
                prefetch(step.v_ahead[b] + offset + line * 64);
            }
            std::memcpy(to, step.v[b] + offset, kValuePairs * 64);
        }
    }
}

// Sums [4 columns][16 rows][16] to the rows of `out`, of which `num_rows` are there.
static inline void add_sums(const float *sums, int64_t num_columns, int64_t num_rows, float *out,
                            int64_t dim) {
    for (int64_t r = 0; r < num_rows; ++r) {
        for (int64_t c = 0; c < num_columns; ++c) {
            float *at = out + r * dim + c * 16;
            store(at, load(at) + load(sums + (c * kTileSide + r) * 16));
        }
    }
}

// The weights of a step that is not whole, each group at its place, zeros around them.
static inline void place_weights(const Tile &tile, const Step &step) {
    if (step.num_groups == kStepGroups) return;
    const int first = first_place(step), end = first + step.num_groups;
    for (int64_t r = 0; r < tile.num_rows; ++r) {
        float *row = tile.scores + r * kStepTokens;
        for (int place = kStepGroups - 1; place >= 0; --place) {
            const bool is_there = place >= first && place < end;
            store(row + place * 16, is_there ? load(row + (place - first) * 16) : Vec{});
        }
    }
}

static inline void value_bf16_tiles(const Tile &tile, const Step &step) {
    alignas(64) float sums[4 * kTileSide * 16];
    constexpr int64_t kHalves = 2;
    const int64_t num_columns = tile.dim / 16;
    gather_pairs(tile, step, tile.keys);
    place_weights(tile, step);
    split_rows(tile.scores, kStepTokens, tile.num_rows, kStepTokens, tile.weight_tiles);
    for (int64_t t = 0; t < num_row_tiles(tile); ++t) {
        const uint16_t *weights = tile.weight_tiles + t * kHalves * kSplitTile;
        const int64_t rows = smaller(kTileSide, tile.num_rows - t * 16);
        for (int64_t c = 0; c < num_columns; c += 4) {
            const int64_t count = smaller(int64_t{4}, num_columns - c);
#define PAGEMILL_ADD(j)                                                        \
    _tile_loadd(6, tile.keys + ((c + (j)) * kHalves + half) * 1024, kTileBytes); \
    _tile_dpbf16ps(j, 4, 6);                                                   \
    _tile_dpbf16ps(j, 5, 6)
#define PAGEMILL_STORE(j) _tile_stored(j, sums + (j) * kTileSide * 16, kTileBytes)
            PAGEMILL_FOUR(count, PAGEMILL_CLEAR);
            for (int64_t half = 0; half < kHalves; ++half) {
                _tile_loadd(4, weights + half * kSplitTile, kTileBytes);
                _tile_loadd(5, weights + half * kSplitTile + kSplitTile / 2, kTileBytes);
                PAGEMILL_FOUR(count, PAGEMILL_ADD);
            }
            PAGEMILL_FOUR(count, PAGEMILL_STORE);
#undef PAGEMILL_ADD
#undef PAGEMILL_STORE
            add_sums(sums, count, rows, tile.partial.acc + t * 16 * tile.dim + c * 16, tile.dim);
        }
    }
}

// V of a step as bytes with its groups together: [columns][16 token quads][16][4]. Nibbles become
// bytes.
template <bool kNibbles>
static void gather_quads(const Step &step, int64_t first, int64_t end, uint8_t *together) {
    const BitVec mask = BitVec{} + 0x0f0f0f0fu;
    for (int64_t c = first; c < end; ++c, together += 1024) {
        for (int b = 0; b < kStepGroups; ++b) {
            uint8_t *to = together + b * 256;
            if (b >= step.num_coded) {
                std::memset(to, 0, 256);
                continue;
            }
            for (int line = 0; line < (kNibbles ? 2 : 4); ++line) {
                const int64_t offset = (c * (kNibbles ? 2 : 4) + line) * 64;
                prefetch(step.v_ahead[b] + offset);
                const BitVec bits = load_bits(step.v[b] + offset);
                if constexpr (kNibbles) {
                    const BitVec low = bits & mask, high = bits >> 4 & mask;
                    std::memcpy(to + line * 64, &low, 64);
                    std::memcpy(to + (line + 2) * 64, &high, 64);
                } else {
                    std::memcpy(to + line * 64, &bits, 64);
                }
            }
        }
    }
}

// Sums of a pair of columns, [2 columns][high, low][16 rows][16], to the rows of the tile.
template <bool kNibbles>
static void add_code_sums(const Tile &tile, const int32_t *sums, int64_t first_row, int64_t column,
                          int64_t num_columns) {
    const int64_t end = smaller(tile.num_rows, first_row + kTileSide);
    for (int64_t r = first_row; r < end; ++r) {
        const Vec factor = broadcast(tile.codes.factors[r]);
        for (int64_t c = 0; c < num_columns; ++c) {
            float *at = tile.partial.acc + r * tile.dim + (column + c) * 16;
            const int32_t *from = sums + c * 512 + (r - first_row) * 16;
            IntVec upper, lower;
            std::memcpy(&upper, from, sizeof upper);
            std::memcpy(&lower, from + 256, sizeof lower);
            Vec sum = fma(to_float((upper << 8) + lower), factor, load(at));
            if constexpr (kNibbles) sum += broadcast(tile.codes.added[r]);
            store(at, sum);
        }
    }
}

// Columns [first, end) of 16 channels each; weights are coded already.
template <bool kNibbles>
static void value_byte_tiles(const Tile &tile, const Step &step, int64_t first, int64_t end) {
    alignas(64) int32_t sums[4 * 256];
    constexpr int64_t kStride = kWeightWords * 4;
    gather_quads<kNibbles>(step, first, end, tile.keys);
    for (int64_t t = 0; t < num_row_tiles(tile); ++t) {
        const int32_t *weights = tile.codes.weights + t * 16 * kWeightWords;
        _tile_loadd(4, weights, kStride);
        _tile_loadd(5, weights + kWeightWords / 2, kStride);
        for (int64_t c = first; c < end; c += 2) {
            const bool has_second = c + 1 < end;
            const uint8_t *v = tile.keys + (c - first) * 1024;
            _tile_zero(0);
            _tile_zero(1);
            _tile_loadd(6, v, kTileBytes);
            _tile_dpbusd(0, 4, 6);
            _tile_dpbusd(1, 5, 6);
            if (has_second) {
                _tile_zero(2);
                _tile_zero(3);
                _tile_loadd(7, v + 1024, kTileBytes);
                _tile_dpbusd(2, 4, 7);
                _tile_dpbusd(3, 5, 7);
            }
            _tile_stored(0, sums, kTileBytes);
            _tile_stored(1, sums + 256, kTileBytes);
            if (has_second) {
                _tile_stored(2, sums + 512, kTileBytes);
                _tile_stored(3, sums + 768, kTileBytes);
            }
            add_code_sums<kNibbles>(tile, sums, t * 16, c, has_second ? 2 : 1);
        }
    }
}

#undef PAGEMILL_CLEAR
#undef PAGEMILL_FOUR

#else

struct TileRegisters {
    explicit TileRegisters(bool) {}
};
static inline void split_rows(const float *, int64_t, int64_t, int64_t, uint16_t *) {}
static inline void score_bf16_tiles(const Tile &, const Step &) {}
static inline void score_byte_tiles(const Tile &, const Step &) {}
static inline void value_bf16_tiles(const Tile &, const Step &) {}
template <bool kNibbles>
static void value_byte_tiles(const Tile &, const Step &, int64_t, int64_t) {}

#endif

}  // namespace pagemill::PAGEMILL_ISA
