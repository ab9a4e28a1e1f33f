// What the packed product of all instruction sets shares: x as integers, and the call.
#pragma once

#include "kernels/packed_weights.hpp"

namespace pagemill {

// 16 tokens of 32 columns of x, each token with a scale of its own: x = scale * code.
struct alignas(64) TokenBlock {
    int32_t words[16][16];  // a token's codes, as the instruction set wants them
    float scales[16];
    float sums[16];         // scale * sum of codes
    int32_t starts[3][16];  // -128 * sum of codes: of columns 0-15, of 16-31, of all
};

constexpr int64_t kTokensOfBlock = 16;

inline int64_t num_token_blocks(int64_t num_tokens, int64_t k) {
    return (num_tokens + kTokensOfBlock - 1) / kTokensOfBlock * (k / kBlockColumns);
}

// Codes of x are high * 2^bits + low, both a byte with sign. Nibbles leave room to multiply both
// at once, so they take fewer bits.
constexpr int kNibbleBits = 4, kByteBits = 7;

// x [T, K] in blocks [T / 16][K / 32], and what to multiply it with; `out` rows lie `out_stride`
// floats apart.
struct PackedCall {
    PackedWeights weights;
    const TokenBlock *x;
    int64_t num_tokens;
    float *out;
    int64_t out_stride;
};

}  // namespace pagemill
