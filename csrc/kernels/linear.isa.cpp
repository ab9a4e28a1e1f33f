// x [T, K] times bfloat16 weights [N, K], for few tokens on processors without matrix tiles.
//
// A 32-bit lane of a weight row holds two neighbours; a shift and a mask make them float32. So x is
// packed once: chunks of 2 * kLanes values, the even ones first, then the odd ones. Each product
// sum has one accumulator and one order, so a token's result does not depend on how many come with
// it.
#include "kernels/entry_points.hpp"
#include "kernels/vec.hpp"

namespace pagemill::PAGEMILL_ISA {

#ifndef __AMX_BF16__  // else linear_amx.isa.cpp

namespace {

constexpr int64_t kChunk = 2 * kLanes;

int64_t padded(int64_t k) { return (k + kChunk - 1) / kChunk * kChunk; }

template <int kTokens, int kWeights>
void multiply_chunk(const float *x, int64_t x_stride, const uint16_t *w, int64_t w_stride,
                    Vec (&acc)[kTokens][kWeights]) {
    for (int n = 0; n < kWeights; ++n) {
        const BitVec bits = load_bits(w + n * w_stride);
        const Vec even = low_bf16(bits), odd = high_bf16(bits);
        for (int t = 0; t < kTokens; ++t) {
            acc[t][n] = fma(even, load(x + t * x_stride), acc[t][n]);
            acc[t][n] = fma(odd, load(x + t * x_stride + kLanes), acc[t][n]);
        }
    }
}

// The last k % kChunk weights of each row, zeros behind them.
template <int kTokens, int kWeights>
void multiply_rest(const float *x, int64_t x_stride, const uint16_t *w, int64_t k, int64_t rest,
                   Vec (&acc)[kTokens][kWeights]) {
    uint16_t last[kWeights * kChunk] = {};
    for (int n = 0; n < kWeights; ++n) {
        std::memcpy(last + n * kChunk, w + n * k, static_cast<size_t>(rest) * sizeof(uint16_t));
    }
    multiply_chunk<kTokens, kWeights>(x, x_stride, last, kChunk, acc);
}

template <int kTokens, int kWeights>
void multiply_tile(const float *x, const uint16_t *w, int64_t k, float *out, int64_t out_stride) {
    Vec acc[kTokens][kWeights] = {};
    const int64_t x_stride = padded(k), whole = k / kChunk * kChunk;
    for (int64_t i = 0; i < whole; i += kChunk) {
        if (kTokens <= 4) {  // memory sets the pace: fetch the tile after the next into L2
            for (int n = 0; n < kWeights; ++n) {
                prefetch(w + i + (n + 2 * kWeights) * k);
            }
        }
        multiply_chunk<kTokens, kWeights>(x + i, x_stride, w + i, k, acc);
    }
    if (whole < k) {
        multiply_rest<kTokens, kWeights>(x + whole, x_stride, w + whole, k, k - whole, acc);
    }
    for (int t = 0; t < kTokens; ++t) {
        for (int n = 0; n < kWeights; ++n) out[t * out_stride + n] = sum(acc[t][n]);
    }
}

// Few tokens go with many weight rows, so that enough sums run beside each other.
template <int kTokens>
constexpr int weight_rows() {
    return kTokens == 1 ? 8 : kTokens == 4 ? 3 : 4;
}

template <int kTokens>
void multiply_rows(const float *x, const uint16_t *w, int64_t k, float *out, int64_t out_stride,
                   int64_t num_rows) {
    constexpr int kWide = weight_rows<kTokens>();
    int64_t n = 0;
    for (; n + kWide <= num_rows; n += kWide) {
        multiply_tile<kTokens, kWide>(x, w + n * k, k, out + n, out_stride);
    }
    for (; n < num_rows; ++n) multiply_tile<kTokens, 1>(x, w + n * k, k, out + n, out_stride);
}

}  // namespace

int64_t linear_pack_floats(int64_t num_tokens, int64_t k) { return num_tokens * padded(k); }

void linear_pack(const float *x, int64_t x_stride, int64_t num_tokens, int64_t k, float *packed) {
    for (int64_t t = 0; t < num_tokens; ++t, x += x_stride) {
        for (int64_t i = 0; i < padded(k); i += kChunk, packed += kChunk) {
            for (int lane = 0; lane < kLanes; ++lane) {
                const int64_t at = i + 2 * lane;
                packed[lane] = at < k ? x[at] : 0.0f;
                packed[kLanes + lane] = at + 1 < k ? x[at + 1] : 0.0f;
            }
        }
    }
}

// A strip of weight rows stays in the first cache while all tokens pass over it.
void linear_bf16(const float *packed, int64_t num_tokens, const uint16_t *w, int64_t k, float *out,
                 int64_t out_stride, int64_t begin, int64_t end) {
    constexpr int64_t kStrip = kLinearStrip;  // a multiple of every weight_rows()
    const int64_t x_stride = padded(k);
    for (int64_t n = begin; n < end; n += kStrip) {
        const int64_t rows = smaller(kStrip, end - n);
        const uint16_t *strip = w + n * k;
        int64_t t = 0;
        for (; t + 4 <= num_tokens; t += 4) {
            multiply_rows<4>(packed + t * x_stride, strip, k, out + t * out_stride + n, out_stride,
                             rows);
        }
        const float *x = packed + t * x_stride;
        float *to = out + t * out_stride + n;
        if (num_tokens - t == 3) multiply_rows<3>(x, strip, k, to, out_stride, rows);
        if (num_tokens - t == 2) multiply_rows<2>(x, strip, k, to, out_stride, rows);
        if (num_tokens - t == 1) multiply_rows<1>(x, strip, k, to, out_stride, rows);
    }
}

#endif

void widen_bf16(const uint16_t *in, float *out, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t bits = uint32_t{in[i]} << 16;
        std::memcpy(out + i, &bits, sizeof bits);
    }
}

}  // namespace pagemill::PAGEMILL_ISA
