// Number formats of one value or one row: fp16, e4m3, scale bytes, the Hadamard transform.
#pragma once

#include "kernels/vec.hpp"

namespace pagemill::PAGEMILL_ISA {

// float32 to fp16, to nearest, ties to even; beyond its range infinity; NaN stays a positive NaN.
static inline uint16_t to_f16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7e00;
    if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65,520
    if (magnitude < 0x38800000u) {  // subnormal: add so that the bits fall where fp16 has them
        float value;
        std::memcpy(&value, &magnitude, 4);
        value += 0.5f;
        std::memcpy(&bits, &value, 4);
        return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
    }
    const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1);
    return static_cast<uint16_t>(sign | (rounded - 0x38000000u) >> 13);
}

// The bits of fp16 numbers in 32-bit lanes as float32. Shifted by 13 they are a float32 whose
// exponent is 112 too small; subnormals get a bit of their own and lose it again by a subtraction.
static inline Vec from_f16_bits(BitVec half) {
    const BitVec magnitude = half & 0x7fffu, sign = (half & 0x8000u) << 16;
    const Vec small = as_float(magnitude + 0x3f000000u) - broadcast(0.5f);
    const BitVec normal = (magnitude << 13) + (112u << 23);
    const BitVec wide = magnitude >= 0x7c00u ? normal + (112u << 23) : normal;  // infinity and NaN
    return as_float((magnitude < 0x400u ? as_bits(small) : wide) | sign);
}

static inline float from_f16(uint16_t half) {
    return from_f16_bits(BitVec{} + uint32_t{half})[0];
}

// 16 fp16 numbers.
static inline Row load_f16_row(const uint8_t *p) {
    Row row;
    for (int i = 0; i < kParts; ++i) {
#if defined(__AVX512F__)
        row.part[i] = _mm512_maskz_cvtph_ps(
            0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
#elif defined(__F16C__)
        row.part[i] =
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p + i * 16)));
#else
        BitVec bits;
        for (int lane = 0; lane < kLanes; ++lane) {
            uint16_t half;
            std::memcpy(&half, p + (i * kLanes + lane) * 2, 2);
            bits[lane] = half;
        }
        row.part[i] = from_f16_bits(bits);
#endif
    }
    return row;
}

// 16 bytes, each in a lane of 32 bits.
static inline BitVec load_byte_lanes(const uint8_t *p) {
#if defined(__AVX512F__)
    return reinterpret_cast<BitVec>(
        _mm512_maskz_cvtepu8_epi32(
        0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
#elif defined(__AVX2__)
    return reinterpret_cast<BitVec>(
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
#else
    BitVec bits;
    for (int lane = 0; lane < kLanes; ++lane) bits[lane] = p[lane];
    return bits;
#endif
}

// Scale bytes of i4c keys: 4 bits of exponent from 2^-11 on, 4 of mantissa.
static inline Vec scale_of_bytes(BitVec bytes) { return as_float((bytes + (116u << 4)) << 19); }

// The smallest scale byte that is not below x >= 0; 2^-11 at least, 31 at most.
static inline uint8_t scale_byte(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const int32_t byte = static_cast<int32_t>((bits + (1u << 19) - 1) >> 19) - (116 << 4);
    return static_cast<uint8_t>(byte < 0 ? 0 : byte > 255 ? 255 : byte);
}

// float32 of magnitude up to 448 to e4m3, to nearest, ties to even.
static inline uint8_t to_e4m3(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
    if (magnitude < 0x3c800000u) {  // below 2^-6: steps of 2^-9, rounded by an addition
        float value;
        std::memcpy(&value, &magnitude, 4);
        value += 16384.0f;
        std::memcpy(&bits, &value, 4);
        return static_cast<uint8_t>(sign | (bits - 0x46800000u));
    }
    const uint32_t rounded = magnitude + 0x7ffffu + (magnitude >> 20 & 1);
    const uint32_t code = (rounded - (120u << 23)) >> 20;
    return static_cast<uint8_t>(sign | (code > 0x7e ? 0x7e : code));
}

// e4m3 bytes in 32-bit lanes as float32.
static inline Vec from_e4m3(BitVec code) {
    const BitVec magnitude = (code & 0x7fu) << 20, sign = (code & 0x80u) << 24;
    const Vec small = as_float(magnitude | (121u << 23)) - as_float(BitVec{} + (121u << 23));
    const BitVec normal = magnitude + (120u << 23);
    return as_float((magnitude < (1u << 23) ? as_bits(small) : normal) | sign);
}

// Lanes i and i ^ kHalf change places.
template <int kHalf>
static inline Vec swap_lanes(Vec x) {
    IntVec places;
    for (int i = 0; i < kLanes; ++i) places[i] = i ^ kHalf;
#if defined(__clang__)
    Vec swapped;
    for (int i = 0; i < kLanes; ++i) swapped[i] = x[i ^ kHalf];
    return swapped;
#else
    return __builtin_shuffle(x, places);
#endif
}

template <int kHalf>
static inline Vec butterfly_inside(Vec x) {
    BitVec signs;
    for (int i = 0; i < kLanes; ++i) signs[i] = i & kHalf ? 0x80000000u : 0;
    return swap_lanes<kHalf>(x) + as_float(as_bits(x) ^ signs);
}

// x [dim], dim a multiple of 16, times the normalized Hadamard matrix, in blocks of the largest
// power of two that divides dim. The order of the sums is that of codec.py: the same bits.
static inline void hadamard(float *x, int64_t dim) {
    const int64_t block = dim & -dim;
    for (int64_t i = 0; i < dim; i += kLanes) {
        Vec part = butterfly_inside<1>(load(x + i));
        part = butterfly_inside<2>(part);
        if constexpr (kLanes > 4) part = butterfly_inside<4>(part);
        if constexpr (kLanes > 8) part = butterfly_inside<8>(part);
        store(x + i, part);
    }
    for (int64_t half = kLanes; half < block; half *= 2) {
        for (int64_t first = 0; first < dim; first += 2 * half) {
            for (int64_t i = first; i < first + half; i += kLanes) {
                const Vec low = load(x + i), high = load(x + i + half);
                store(x + i, low + high);
                store(x + i + half, low - high);
            }
        }
    }
    const double root = __builtin_sqrt(static_cast<double>(block));
    const Vec factor = broadcast(static_cast<float>(1.0 / root));
    for (int64_t i = 0; i < dim; i += kLanes) store(x + i, load(x + i) * factor);
}

}  // namespace pagemill::PAGEMILL_ISA
