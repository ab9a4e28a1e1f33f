#include "kernels/gguf_decode.hpp"

#include <algorithm>
#include <cstring>

#include "kernels/gguf_blocks.hpp"
#include "thread_pool.hpp"

// The results equal the reference decoder's bit for bit, which rounds after every product.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

namespace pagemill {
namespace {

void decode_f32(const uint8_t *data, int64_t count, float *out) {
    std::memcpy(out, data, static_cast<size_t>(count) * 4);
}

void decode_f16(const uint8_t *data, int64_t count, float *out) {
    for (int64_t i = 0; i < count; ++i) out[i] = load_half(data + 2 * i);
}

void decode_bf16(const uint8_t *data, int64_t count, float *out) {
    for (int64_t i = 0; i < count; ++i) out[i] = bits_to_float(load_u16(data + 2 * i) << 16);
}

// d (half), 32 signed bytes
void decode_q8_0(const uint8_t *block, float *out) {
    float d = load_half(block);
    const int8_t *q = reinterpret_cast<const int8_t *>(block + 2);
    for (int i = 0; i < 32; ++i) out[i] = static_cast<float>(q[i]) * d;
}

// d, 16 bytes: low nibbles are values 0-15, high nibbles 16-31
void decode_q4_0(const uint8_t *block, float *out) {
    float d = load_half(block);
    const uint8_t *q = block + 2;
    for (int i = 0; i < 16; ++i) {
        out[i] = static_cast<float>((q[i] & 15) - 8) * d;
        out[i + 16] = static_cast<float>((q[i] >> 4) - 8) * d;
    }
}

// d, minimum, nibbles as in Q4_0
void decode_q4_1(const uint8_t *block, float *out) {
    float d = load_half(block), least = load_half(block + 2);
    const uint8_t *q = block + 4;
    for (int i = 0; i < 16; ++i) {
        out[i] = d * static_cast<float>(q[i] & 15) + least;
        out[i + 16] = d * static_cast<float>(q[i] >> 4) + least;
    }
}

// d, 32 fifth bits, nibbles
void decode_q5_0(const uint8_t *block, float *out) {
    float d = load_half(block);
    uint32_t high = load_u32(block + 2);
    const uint8_t *q = block + 6;
    for (int i = 0; i < 16; ++i) {
        out[i] = static_cast<float>(((q[i] & 15) | fifth_bit(high, i)) - 16) * d;
        out[i + 16] = static_cast<float>(((q[i] >> 4) | fifth_bit(high, i + 16)) - 16) * d;
    }
}

// d, minimum, 32 fifth bits, nibbles
void decode_q5_1(const uint8_t *block, float *out) {
    float d = load_half(block), least = load_half(block + 2);
    uint32_t high = load_u32(block + 4);
    const uint8_t *q = block + 8;
    for (int i = 0; i < 16; ++i) {
        out[i] = d * static_cast<float>((q[i] & 15) | fifth_bit(high, i)) + least;
        out[i + 16] = d * static_cast<float>((q[i] >> 4) | fifth_bit(high, i + 16)) + least;
    }
}

// d, d of minima, packed scales, (Q5_K: 32 bytes of fifth bits), 128 bytes: each 32 hold two runs
// of 32 values, low nibbles first; run r has scale r
void decode_k45(const uint8_t *block, const uint8_t *high, const uint8_t *q, float *out) {
    float d = load_half(block), d_least = load_half(block + 2);
    uint8_t scales[8], minima[8];
    unpack_scales(block + 4, scales, minima);
    for (int run = 0; run < 8; ++run) {
        float scale = d * static_cast<float>(scales[run]);
        float least = d_least * static_cast<float>(minima[run]);
        const uint8_t *bytes = q + (run / 2) * 32;
        int shift = (run & 1) * 4;
        for (int i = 0; i < 32; ++i) {
            int code = (bytes[i] >> shift) & 15;
            if (high) code |= ((high[i] >> run) & 1) << 4;
            out[run * 32 + i] = scale * static_cast<float>(code) - least;
        }
    }
}

void decode_q4_k(const uint8_t *block, float *out) { decode_k45(block, nullptr, block + 16, out); }

void decode_q5_k(const uint8_t *block, float *out) {
    decode_k45(block, block + 16, block + 48, out);
}

// 128 bytes of low nibbles, 64 bytes of two high bits, 16 signed scales, d; two halves of 128
// values
void decode_q6_k(const uint8_t *block, float *out) {
    const int8_t *scales = reinterpret_cast<const int8_t *>(block + 192);
    float d = load_half(block + 208);
    for (int run = 0; run < 8; ++run) {  // 32 values each
        int half = run / 4, part = run % 4;
        const uint8_t *low = block + half * 64 + (part & 1) * 32;
        const uint8_t *high = block + 128 + half * 32;
        for (int i = 0; i < 32; ++i) {
            int code = (low[i] >> (part / 2 * 4)) & 15;
            code |= ((high[i] >> (2 * part)) & 3) << 4;
            float scale = d * static_cast<float>(scales[run * 2 + i / 16]);
            out[run * 32 + i] = scale * static_cast<float>(code - 32);
        }
    }
}

template <void (*kDecodeBlock)(const uint8_t *, float *), int kValues, int kBytes>
void each_block(const uint8_t *data, int64_t count, float *out) {
    for (int64_t i = 0; i < count; ++i) kDecodeBlock(data + i * kBytes, out + i * kValues);
}

constexpr GgufType kTypes[] = {
    {"F32", 1, 4, decode_f32},
    {"F16", 1, 2, decode_f16},
    {"BF16", 1, 2, decode_bf16},
    {"Q8_0", 32, 34, each_block<decode_q8_0, 32, 34>},
    {"Q4_0", 32, 18, each_block<decode_q4_0, 32, 18>},
    {"Q4_1", 32, 20, each_block<decode_q4_1, 32, 20>},
    {"Q5_0", 32, 22, each_block<decode_q5_0, 32, 22>},
    {"Q5_1", 32, 24, each_block<decode_q5_1, 32, 24>},
    {"Q4_K", 256, 144, each_block<decode_q4_k, 256, 144>},
    {"Q5_K", 256, 176, each_block<decode_q5_k, 256, 176>},
    {"Q6_K", 256, 210, each_block<decode_q6_k, 256, 210>},
};

}  // namespace

const GgufType *find_gguf_type(const char *name) {
    for (const GgufType &type : kTypes) {
        if (!std::strcmp(type.name, name)) return &type;
    }
    return nullptr;
}

void gguf_decode(const GgufType &type, const uint8_t *data, int64_t num_blocks, float *out) {
    const int64_t blocks_per_item = 65536 / type.block_values;
    auto decode_item = [&](int64_t item) {
        int64_t first = item * blocks_per_item;
        int64_t count = std::min(num_blocks - first, blocks_per_item);
        type.decode(data + first * type.block_bytes, count, out + first * type.block_values);
    };
    parallel_for((num_blocks + blocks_per_item - 1) / blocks_per_item, decode_item);
}

}  // namespace pagemill
