// Dot products of bytes: 16 lanes of 32 bits, each the sum of four products.
//
// One operand lies in lanes of four bytes (16 tokens of 4 channels, or 16 channels of 4 tokens),
// the other is one quad for all lanes, prepared as `kQuadWords` words.
#pragma once

#include "kernels/vec.hpp"

namespace pagemill::PAGEMILL_ISA {

#if defined(__AVX512VNNI__)
constexpr int kQuadWords = 1;  // four bytes
#else
constexpr int kQuadWords = 2;  // two pairs of 16 bits: bytes 0 and 2, bytes 1 and 3
#endif

struct IntRow {
    IntVec part[kParts];
};

static inline IntRow splat_int(int32_t x) {
    IntRow row;
    for (int i = 0; i < kParts; ++i) row.part[i] = IntVec{} + x;
    return row;
}

struct ByteRow {
    BitVec part[kParts];
};

PAGEMILL_INLINE static inline ByteRow load_bytes(const uint8_t *p) {
    ByteRow row;
    for (int i = 0; i < kParts; ++i) row.part[i] = load_bits(p + i * 4 * kLanes);
    return row;
}

struct Quad {
    IntVec word[kQuadWords];
};

PAGEMILL_INLINE static inline Quad load_quad(const int32_t *words) {
    Quad quad;
    for (int i = 0; i < kQuadWords; ++i) quad.word[i] = IntVec{} + words[i];
    return quad;
}

// Pairs of 16 bits: a.low * b.low + a.high * b.high + c.
static inline IntVec dot_pairs(IntVec c, IntVec a, IntVec b) {
#if defined(__AVX512F__)
    return c + reinterpret_cast<IntVec>(_mm512_madd_epi16((__m512i)a, (__m512i)b));
#elif defined(__AVX2__)
    return c + reinterpret_cast<IntVec>(_mm256_madd_epi16((__m256i)a, (__m256i)b));
#else
    return c + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// acc + unsigned bytes of the lanes times the signed bytes of the quad.
PAGEMILL_INLINE static inline IntVec dot_unsigned(IntVec acc, BitVec lanes, const Quad &quad) {
#if defined(__AVX512VNNI__)
    return reinterpret_cast<IntVec>(
        _mm512_dpbusd_epi32((__m512i)acc, (__m512i)lanes, (__m512i)quad.word[0]));
#else
    const BitVec even = lanes & 0x00ff00ffu, odd = lanes >> 8 & 0x00ff00ffu;
    acc = dot_pairs(acc, reinterpret_cast<IntVec>(even), quad.word[0]);
    return dot_pairs(acc, reinterpret_cast<IntVec>(odd), quad.word[1]);
#endif
}

// acc + signed bytes of the lanes times the unsigned bytes of the quad.
PAGEMILL_INLINE static inline IntVec dot_signed(IntVec acc, BitVec lanes, const Quad &quad) {
#if defined(__AVX512VNNI__)
    return reinterpret_cast<IntVec>(
        _mm512_dpbusd_epi32((__m512i)acc, (__m512i)quad.word[0], (__m512i)lanes));
#else
    // bytes with their sign as 16 bits: (x ^ 128) - 128 in each half, without a borrow between them
    const BitVec even = lanes & 0x00ff00ffu, odd = lanes >> 8 & 0x00ff00ffu;
    auto with_sign = [](BitVec x) {
        const BitVec low = ((x & 0xffffu) ^ 0x80u) - 0x80u, high = ((x >> 16) ^ 0x80u) - 0x80u;
        return reinterpret_cast<IntVec>((low & 0xffffu) | high << 16);
    };
    acc = dot_pairs(acc, with_sign(even), quad.word[0]);
    return dot_pairs(acc, with_sign(odd), quad.word[1]);
#endif
}

// 16 integers of a byte each to 4 quads of words.
static inline void store_quads(int32_t *words, const IntRow &codes) {
#if defined(__AVX512VNNI__)
    _mm_storeu_si128(reinterpret_cast<__m128i *>(words),
                     _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)codes.part[0]));
#else
    int32_t lanes[16];
    std::memcpy(lanes, &codes, sizeof lanes);
    for (int quad = 0; quad < 4; ++quad) {
        const int32_t *four = lanes + 4 * quad;
        words[2 * quad] = (four[0] & 0xffff) | static_cast<int32_t>(uint32_t(four[2]) << 16);
        words[2 * quad + 1] = (four[1] & 0xffff) | static_cast<int32_t>(uint32_t(four[3]) << 16);
    }
#endif
}

// To the nearest integer, ties to even; |x| < 2^22.
static inline IntVec to_int(Vec x) {
#if defined(__AVX512F__)
    return reinterpret_cast<IntVec>(_mm512_maskz_cvtps_epi32(0xffff, x));
#elif defined(__AVX2__)
    return reinterpret_cast<IntVec>(_mm256_cvtps_epi32(x));
#else
    return reinterpret_cast<IntVec>(as_bits(x + broadcast(12582912.0f)) - 0x4b400000u);
#endif
}

static inline Vec to_float(IntVec x) { return __builtin_convertvector(x, Vec); }

static inline int32_t sum_ints(const IntRow &row) {
    IntVec total = row.part[0];
    for (int i = 1; i < kParts; ++i) total += row.part[i];
    int32_t sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += total[i];
    return sum;
}

// The largest of numbers >= 0, where NaN counts as larger than all: such numbers are ordered as
// their bits are.
static inline float largest_or_nan(const Row &row) {
    IntVec best = reinterpret_cast<IntVec>(row.part[0]);
    for (int i = 1; i < kParts; ++i) {
        const IntVec bits = reinterpret_cast<IntVec>(row.part[i]);
        best = bits > best ? bits : best;
    }
#if defined(__AVX2__)
    __m256i halves[sizeof best / 32];  // the reducing intrinsic of GCC 12 warns of values not set
    std::memcpy(halves, &best, sizeof best);
    __m256i half = halves[0];
    if constexpr (kLanes == 16) half = _mm256_max_epi32(half, halves[sizeof best / 32 - 1]);
    __m128i x = _mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    const int32_t top = _mm_cvtsi128_si32(_mm_max_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
#else
    int32_t top = best[0];
    for (int i = 1; i < kLanes; ++i) top = best[i] > top ? best[i] : top;
#endif
    float value;
    std::memcpy(&value, &top, 4);
    return value;
}

}  // namespace pagemill::PAGEMILL_ISA
