// Sizes of the KV formats. src/pagemill/kernels/codec.py says what the bytes mean.
#pragma once

#include <cstdint>

namespace pagemill {

constexpr int kGroupTokens = 16;  // tokens that a number format codes together
constexpr int kPlaneChannels = 64;  // channels of V that share a scale where V has 4 bits
constexpr int kMaxHeadDim = 512;

enum class KvFormat : int { kFp32, kBf16, kI8, kF8, kK8v4, kI4c };

// Bytes of one head's token group, in memory order.
struct GroupBytes {
    int64_t meta, k, v;
    int64_t total() const { return meta + k + v; }
};

inline int64_t num_planes(int64_t dim) { return (dim + kPlaneChannels - 1) / kPlaneChannels; }

// Where the metadata of i4c keys ends and that of V begins.
inline int64_t i4c_key_meta(int64_t dim) { return (3 * dim + 63) / 64 * 64; }

inline GroupBytes group_bytes_of(KvFormat format, int64_t dim) {
    switch (format) {
        case KvFormat::kFp32: return {0, 64 * dim, 64 * dim};
        case KvFormat::kBf16: return {0, 32 * dim, 32 * dim};
        case KvFormat::kI8:
        case KvFormat::kF8: return {64, 16 * dim, 16 * dim};
        case KvFormat::kK8v4: return {64 + 64 * num_planes(dim), 16 * dim, 8 * dim};
        case KvFormat::kI4c: return {i4c_key_meta(dim) + 64 * num_planes(dim), 8 * dim, 8 * dim};
    }
    return {};
}

// Whether K or V is multiplied by a Hadamard matrix before it is coded.
inline bool rotates_k(KvFormat format) {
    return format == KvFormat::kI8 || format == KvFormat::kK8v4;
}
inline bool rotates_v(KvFormat format) { return rotates_k(format) || format == KvFormat::kI4c; }

// Tokens are kept raw, in bf16, until their group of 16 is whole.
inline bool codes_whole_groups(KvFormat format) { return format == KvFormat::kI4c; }

}  // namespace pagemill
