// Vectors of the native width, for sources that are compiled once per instruction set. Everything
// lies in the namespace of the instruction set, so that no two objects share an inline function.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#ifndef PAGEMILL_ISA
#error "this header is for *.isa.cpp only"
#endif

namespace pagemill::PAGEMILL_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kVectorRegisters = 32;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kVectorRegisters = 16;
#else
constexpr int kLanes = 4;
constexpr int kVectorRegisters = 16;
#endif
constexpr int kParts = 16 / kLanes;  // vectors in a row of 16 values

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t BitVec __attribute__((vector_size(4 * kLanes)));

// fn(0), fn(1) ... fn(kCount - 1) with an index that is a constant from the start, so that arrays
// it runs over live in registers.
#if defined(__SANITIZE_ADDRESS__)  // a plain loop: checks on every unrolled access compile for
                                   // minutes
#define PAGEMILL_INLINE
template <int kCount, typename Fn>
static inline void unroll(const Fn &fn) {
    for (int i = 0; i < kCount; ++i) fn(i);
}
#else
#define PAGEMILL_INLINE __attribute__((always_inline))
template <int kValue>
struct Index {
    PAGEMILL_INLINE constexpr operator int() const { return kValue; }
};

template <int kCount, int kFirst = 0, typename Fn>
PAGEMILL_INLINE static inline void unroll(const Fn &fn) {
    if constexpr (kFirst < kCount) {
        fn(Index<kFirst>{});
        unroll<kCount, kFirst + 1>(fn);
    }
}
#endif

// 16 values: the scores of a token group, or 16 channels.
struct Row {
    Vec part[kParts];
};

static inline Vec load(const void *p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

static inline BitVec load_bits(const void *p) {
    BitVec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

static inline void store(float *p, Vec v) { std::memcpy(p, &v, sizeof v); }

static inline Vec broadcast(float x) { return x - Vec{}; }

// The first `count` values of p, 0 behind them; and the way back.
static inline Vec load_some(const float *p, int64_t count) {
    Vec v{};
    std::memcpy(&v, p, static_cast<size_t>(count) * sizeof(float));
    return v;
}

static inline void store_some(float *p, Vec v, int64_t count) {
    std::memcpy(p, &v, static_cast<size_t>(count) * sizeof(float));
}

static inline Vec as_float(BitVec v) { return reinterpret_cast<Vec>(v); }
static inline BitVec as_bits(Vec v) { return reinterpret_cast<BitVec>(v); }

// a * b + c, rounded once where the instruction set can
static inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

static inline Vec larger(Vec a, Vec b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    return _mm256_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}

static inline float larger(float a, float b) { return a > b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// The halves of a vector added (or compared) until one value is left.
template <typename Combine>
static inline float reduce(Vec v, Combine combine) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
    __m256 halves[2];  // the extracting intrinsics of GCC 12 warn of values not set
    std::memcpy(halves, &v, sizeof v);
    const __m256 half = combine(halves[0], halves[1]);
#else
    const __m256 half = v;
#endif
    __m128 x = combine(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    x = combine(x, _mm_movehl_ps(x, x));
    return combine(x, _mm_movehdup_ps(x))[0];
#else
    return combine(combine(v[0], v[2]), combine(v[1], v[3]));
#endif
}

static inline float sum(Vec v) {
    return reduce(v, [](auto a, auto b) { return a + b; });
}

static inline float largest(Vec v) {
    return reduce(v, [](auto a, auto b) { return a > b ? a : b; });
}

// Is a value above the limit? (NaN is not.)
static inline bool any_above(Vec v, float limit) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(v, broadcast(limit), _CMP_GT_OQ) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps(_mm256_cmp_ps(v, broadcast(limit), _CMP_GT_OQ)) != 0;
#else
    bool found = false;
    for (int i = 0; i < kLanes; ++i) found |= v[i] > limit;
    return found;
#endif
}

static inline Row load_row(const float *p) {
    Row row;
    for (int i = 0; i < kParts; ++i) row.part[i] = load(p + i * kLanes);
    return row;
}

static inline void store_row(float *p, const Row &row) {
    for (int i = 0; i < kParts; ++i) store(p + i * kLanes, row.part[i]);
}

static inline Row splat_row(float x) {
    Row row;
    for (int i = 0; i < kParts; ++i) row.part[i] = broadcast(x);
    return row;
}

static inline float sum(const Row &row) {
    Vec total = row.part[0];
    for (int i = 1; i < kParts; ++i) total += row.part[i];
    return sum(total);
}

static inline float largest(const Row &row) {
    Vec best = row.part[0];
    for (int i = 1; i < kParts; ++i) best = larger(best, row.part[i]);
    return largest(best);
}

// 2^x for x <= 127; 0 below -126, -inf included. Relative error 1.2e-7. The sum with 1.5 * 2^23
// rounds x to an integer and leaves that integer in its low bits; the rest is a polynomial fitted
// to 2^f on [-0.5, 0.5].
static inline Vec exp2(Vec x) {
    const Vec shifted = x + broadcast(12582912.0f);
    const Vec f = x - (shifted - broadcast(12582912.0f));
    Vec p = fma(broadcast(1.53458106e-4f), f, broadcast(1.33999315e-3f));
    p = fma(p, f, broadcast(9.61848896e-3f));
    p = fma(p, f, broadcast(5.55032878e-2f));
    p = fma(p, f, broadcast(2.40226469e-1f));
    p = fma(p, f, broadcast(6.93147206e-1f));
    p = fma(p, f, broadcast(1.0f));
    const Vec scaled = as_float(as_bits(p) + (as_bits(shifted) << 23));
    return x < broadcast(-126.0f) ? Vec{} : scaled;
}

static inline float exp2(float x) { return exp2(broadcast(x))[0]; }

// tanh(x) = 1 - 2 / (e^2x + 1); absolute error 2e-7
static inline Vec tanh(Vec x) {
    const Vec high = broadcast(40.0f), low = broadcast(-40.0f);
    x = x > high ? high : x;
    x = x < low ? low : x;
    const Vec e = exp2(x * broadcast(2.0f * 1.44269504f));
    return broadcast(1.0f) - broadcast(2.0f) / (e + broadcast(1.0f));
}

static inline void prefetch(const void *p) { __builtin_prefetch(p, 0, 2); }

// float32 to bfloat16, to nearest, ties to even; NaN stays NaN
static inline uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// A pair of bfloat16 in each 32-bit lane: the low one and the high one as float32.
static inline Vec low_bf16(BitVec pair) { return as_float(pair << 16); }
static inline Vec high_bf16(BitVec pair) { return as_float(pair & 0xffff0000u); }

}  // namespace pagemill::PAGEMILL_ISA
