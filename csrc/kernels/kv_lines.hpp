// How each KV format lies in memory, for the attention and write kernels. A line is 64 bytes.
#pragma once

#include "kernels/kernel_table.hpp"
#include "kernels/vec.hpp"

namespace pagemill::PAGEMILL_ISA {

// A pair is two rows of 16: channels 2i and 2i + 1 of 16 tokens (K), or tokens 2i and 2i + 1 of 16
// channels (V). They are loaded one after the other: both at once, and the sums of six query rows
// would no longer fit in 16 registers.
struct Fp32Lines {
    static constexpr int kPairBytes = 128;
    static constexpr int kMaxRows = kVectorRegisters == 16 && kParts == 4 ? 2 : 6;

    static inline Row load_even(const uint8_t *p) {
        return load_row(reinterpret_cast<const float *>(p));
    }
    static inline Row load_odd(const uint8_t *p) { return load_even(p + 64); }

    static inline void put(uint8_t *lines, int64_t pair, int lane, float even, float odd) {
        float *line = reinterpret_cast<float *>(lines + pair * kPairBytes);
        line[lane] = even;
        line[16 + lane] = odd;
    }

    static inline void put_one(uint8_t *lines, int64_t pair, int lane, int which, float x) {
        reinterpret_cast<float *>(lines + pair * kPairBytes)[which * 16 + lane] = x;
    }
};

struct Bf16Lines {
    static constexpr int kPairBytes = 64;
    static constexpr int kMaxRows = kVectorRegisters == 16 ? (kParts == 4 ? 2 : 4) : 6;

    static inline Row load_even(const uint8_t *p) {
        Row row;
        for (int i = 0; i < kParts; ++i) row.part[i] = low_bf16(load_bits(p + i * 4 * kLanes));
        return row;
    }

    static inline Row load_odd(const uint8_t *p) {
        Row row;
        for (int i = 0; i < kParts; ++i) row.part[i] = high_bf16(load_bits(p + i * 4 * kLanes));
        return row;
    }

    static inline void put(uint8_t *lines, int64_t pair, int lane, float even, float odd) {
        put_one(lines, pair, lane, 0, even);
        put_one(lines, pair, lane, 1, odd);
    }

    static inline void put_one(uint8_t *lines, int64_t pair, int lane, int which, float x) {
        uint16_t bits = to_bf16(x);
        std::memcpy(lines + pair * kPairBytes + lane * 4 + which * 2, &bits, 2);
    }
};

// K has D / 2 pairs in order. V has 8 pairs (of tokens) for each 16 channels.
constexpr int kValuePairs = kGroupTokens / 2;

// The bytes of a head's token group:
static inline uint8_t *group_at(const KvView &kv, int64_t block, int head, int64_t group_in_block) {
    const int64_t groups = kv.block_size / kGroupTokens;
    return kv.base + block * kv.tile_bytes + (head * groups + group_in_block) * kv.group_bytes;
}

}  // namespace pagemill::PAGEMILL_ISA
