// x [T, K] times bfloat16 weights [N, K] on processors with matrix tiles (AMX).
//
// 16 weight rows of 32 values are a tile as they lie; x is the other factor, packed once. A float32
// x is split into two bfloat16, x = high + low + 2^-18 |x|, and both are multiplied: memory sets
// the pace, so the second product is free and x loses nothing that bfloat16 weights could show.
// One tile column is one token and its sums have one order: a token's result does not depend on how
// many come with it.
//
//     registers   0 1   sums of token tile a with weight tiles 4 and 5
//                 2 3   sums of token tile b
//                 4 5   weights of 16 rows each
//                 6 7   high and low part of a token tile
#include "kernels/entry_points.hpp"
#include "kernels/tile_registers.hpp"

#ifdef __AMX_BF16__

namespace pagemill::PAGEMILL_ISA {
namespace {

constexpr int64_t kDepth = 32;       // values of a tile row
constexpr int64_t kStrip = kLinearStrip;  // two weight tiles
constexpr int64_t kTileFloats = 256;  // 1,024 bytes
constexpr int64_t kAhead = 16;        // steps of 32 rows x 32 values

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Strip of 32 weight rows, of which `num_rows` are there.
struct Strip {
    const uint16_t *w;
    int64_t k, num_rows;
};

// A weight tile that lies whole in memory is read where it lies; else a copy with zeros around it.
const uint16_t *whole_tile(const Strip &strip, int64_t row, int64_t column, uint16_t *copy) {
    const uint16_t *at = strip.w + row * strip.k + column;
    const int64_t rows = larger(int64_t{0}, smaller(kTileSide, strip.num_rows - row));
    const int64_t columns = smaller(kDepth, strip.k - column);
    if (rows == kTileSide && columns == kDepth) return at;
    std::memset(copy, 0, kTileFloats * sizeof(float));
    for (int64_t i = 0; i < rows; ++i) {
        std::memcpy(copy + i * kDepth, at + i * strip.k,
                    static_cast<size_t>(columns) * sizeof(uint16_t));
    }
    return copy;
}

// What is read kAhead steps later, in this strip or the next.
void prefetch_ahead(const Strip &strip, int64_t column) {
    const int64_t width = ceil_div(strip.k, kDepth) * kDepth, target = column + kAhead * kDepth;
    const uint16_t *at = strip.w + (target < width ? target : kStrip * strip.k + target - width);
    for (int64_t i = 0; i < kStrip; ++i) prefetch(at + i * strip.k);
}

template <int kTokenTiles>
void multiply(const Strip &strip, const float *a, const float *b, bool is_first) {
    alignas(64) uint16_t copies[2][kTileSide * kDepth];
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kTokenTiles == 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t column = 0; column < strip.k; column += kDepth) {
        if (is_first) prefetch_ahead(strip, column);
        const uint16_t *upper = whole_tile(strip, 0, column, copies[0]);
        const uint16_t *lower = whole_tile(strip, kTileSide, column, copies[1]);
        const auto stride = [&](const uint16_t *tile, int i) {
            return tile == copies[i] ? kTileBytes : strip.k * int64_t{sizeof(uint16_t)};
        };
        _tile_loadd(4, upper, stride(upper, 0));
        _tile_loadd(5, lower, stride(lower, 1));
        _tile_loadd(6, a, kTileBytes);
        _tile_loadd(7, a + kTileFloats, kTileBytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        _tile_dpbf16ps(0, 4, 7);
        _tile_dpbf16ps(1, 5, 7);
        if constexpr (kTokenTiles == 2) {
            _tile_loadd(6, b, kTileBytes);
            _tile_loadd(7, b + kTileFloats, kTileBytes);
            _tile_dpbf16ps(2, 4, 6);
            _tile_dpbf16ps(3, 5, 6);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
            b += 2 * kTileFloats;
        }
        a += 2 * kTileFloats;
    }
}

// rows[i][j] becomes rows[j][i]. The masks leave nothing out: the plain intrinsics of GCC 12 warn
// of values not set.
void transpose(uint32_t (&rows)[kTileSide][kTileSide]) {
    constexpr __mmask16 kAll = 0xffff;
    constexpr __mmask8 kAll8 = 0xff;
    __m512i x[16], y[16];
    for (int i = 0; i < 16; ++i) x[i] = _mm512_load_si512(rows[i]);
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_maskz_unpacklo_epi32(kAll, x[i], x[i + 1]);
        y[i + 1] = _mm512_maskz_unpackhi_epi32(kAll, x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        for (int j = 0; j < 2; ++j) {
            x[i + 2 * j] = _mm512_maskz_unpacklo_epi64(kAll8, y[i + j], y[i + 2 + j]);
            x[i + 2 * j + 1] = _mm512_maskz_unpackhi_epi64(kAll8, y[i + j], y[i + 2 + j]);
        }
    }
    // x[4 i + j]: in each 128-bit lane l, column 4 l + j of the rows 4 i .. 4 i + 3
    for (int j = 0; j < 4; ++j) {
        const __m512i a = _mm512_maskz_shuffle_i32x4(kAll, x[j], x[4 + j], 0x88);
        const __m512i b = _mm512_maskz_shuffle_i32x4(kAll, x[j], x[4 + j], 0xdd);
        const __m512i c = _mm512_maskz_shuffle_i32x4(kAll, x[8 + j], x[12 + j], 0x88);
        const __m512i d = _mm512_maskz_shuffle_i32x4(kAll, x[8 + j], x[12 + j], 0xdd);
        _mm512_store_si512(rows[j], _mm512_maskz_shuffle_i32x4(kAll, a, c, 0x88));
        _mm512_store_si512(rows[4 + j], _mm512_maskz_shuffle_i32x4(kAll, b, d, 0x88));
        _mm512_store_si512(rows[8 + j], _mm512_maskz_shuffle_i32x4(kAll, a, c, 0xdd));
        _mm512_store_si512(rows[12 + j], _mm512_maskz_shuffle_i32x4(kAll, b, d, 0xdd));
    }
}

struct alignas(64) Sums {
    uint32_t rows[kTileSide][kTileSide];
};

// Sums of 16 weight rows and up to 16 tokens to out[token][row].
void store_sums(Sums &sums, float *out, int64_t out_stride, int64_t num_tokens,
                int64_t num_rows) {
    if (num_rows <= 0) return;
    transpose(sums.rows);
    const __mmask16 mask = __mmask16(0xffffu >> (kTileSide - smaller(kTileSide, num_rows)));
    for (int64_t t = 0; t < smaller(kTileSide, num_tokens); ++t) {
        _mm512_mask_storeu_epi32(out + t * out_stride, mask, _mm512_load_si512(sums.rows[t]));
    }
}

// 32 values of a token as 16 pairs of bfloat16: the rounded ones, and what rounding took away.
void split(const float *x, int64_t count, uint32_t *high, uint32_t *low) {
    const uint32_t there = count >= kDepth ? 0xffffffffu : (1u << count) - 1;
    const __m512 a = _mm512_maskz_loadu_ps(__mmask16(there), x);
    const __m512 b = _mm512_maskz_loadu_ps(__mmask16(there >> 16), x + 16);
    const __m512bh rounded = _mm512_cvtne2ps_pbh(b, a);
    __m512i pairs;
    std::memcpy(&pairs, &rounded, sizeof pairs);
    _mm512_store_si512(high, pairs);
    // Lanes 0 .. 7 of the pairs come from a, 8 .. 15 from b.
    const __m512i first = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    const Vec even = low_bf16(load_bits(high)), odd = high_bf16(load_bits(high));
    const __m512 rest_a = a - _mm512_permutex2var_ps(even, first, odd);
    const __m512 rest_b = b - _mm512_permutex2var_ps(even, second, odd);
    const __m512bh rest = _mm512_cvtne2ps_pbh(rest_b, rest_a);
    std::memcpy(low, &rest, sizeof rest);
}

}  // namespace

int64_t linear_pack_floats(int64_t num_tokens, int64_t k) {
    return ceil_div(num_tokens, kTileSide) * ceil_div(k, kDepth) * 2 * kTileFloats;
}

// A token tile after the other; of each, for 32 values at a time, its high tile and its low tile
// [16 pairs][16 tokens].
void linear_pack(const float *x, int64_t x_stride, int64_t num_tokens, int64_t k, float *packed) {
    for (int64_t first = 0; first < num_tokens; first += kTileSide) {
        const int64_t count = smaller(kTileSide, num_tokens - first);
        for (int64_t column = 0; column < k; column += kDepth, packed += 2 * kTileFloats) {
            alignas(64) uint32_t parts[2][kTileSide][kTileSide] = {};
            for (int64_t t = 0; t < count; ++t) {
                split(x + (first + t) * x_stride + column, smaller(kDepth, k - column),
                      parts[0][t], parts[1][t]);
            }
            transpose(parts[0]);
            transpose(parts[1]);
            std::memcpy(packed, parts, sizeof parts);
        }
    }
}

void linear_bf16(const float *packed, int64_t num_tokens, const uint16_t *w, int64_t k, float *out,
                 int64_t out_stride, int64_t begin, int64_t end) {
    const TileRegisters registers;
    const int64_t tile_stride = ceil_div(k, kDepth) * 2 * kTileFloats;
    for (int64_t n = begin; n < end; n += kStrip) {
        const Strip strip{w + n * k, k, smaller(kStrip, end - n)};
        for (int64_t t = 0; t < num_tokens; t += 2 * kTileSide) {
            const float *a = packed + t / kTileSide * tile_stride;
            float *to = out + t * out_stride + n;
            const int64_t count = num_tokens - t;
            Sums sums[4];
            if (count > kTileSide) {
                multiply<2>(strip, a, a + tile_stride, t == 0);
                _tile_stored(2, &sums[2], kTileBytes);
                _tile_stored(3, &sums[3], kTileBytes);
            } else {
                multiply<1>(strip, a, nullptr, t == 0);
            }
            _tile_stored(0, &sums[0], kTileBytes);
            _tile_stored(1, &sums[1], kTileBytes);
            for (int64_t i = 0; i < (count > kTileSide ? 4 : 2); ++i) {
                const int64_t row = i % 2 * kTileSide, token = i / 2 * kTileSide;
                store_sums(sums[i], to + token * out_stride + row, out_stride, count - token,
                           strip.num_rows - row);
            }
        }
    }
}

}  // namespace pagemill::PAGEMILL_ISA

#endif
