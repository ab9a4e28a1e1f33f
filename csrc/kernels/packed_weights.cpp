#include "kernels/packed_weights.hpp"

#include <cstring>

#include "kernels/gguf_blocks.hpp"
#include "thread_pool.hpp"

namespace pagemill {
namespace {

constexpr int kMaxGroups = 16;  // of a GGUF block
constexpr int kMaxColumns = 256;

// A GGUF block taken apart.
struct Codes {
    int8_t code[kMaxColumns];
    float scale[kMaxGroups], minimum[kMaxGroups];
};

struct Source {
    PackedForm form;
    int64_t block_columns, block_bytes;
    void (*read)(const uint8_t *block, Codes &codes);
};

// Sixteen bytes of nibbles: values 0-15, then 16-31.
void read_nibbles(const uint8_t *q, int8_t *code) {
    for (int i = 0; i < 16; ++i) {
        code[i] = static_cast<int8_t>(q[i] & 15);
        code[i + 16] = static_cast<int8_t>(q[i] >> 4);
    }
}

void read_fives(uint32_t high, const uint8_t *q, int taken_off, int8_t *code) {
    read_nibbles(q, code);
    for (int i = 0; i < 32; ++i) {
        code[i] = static_cast<int8_t>((code[i] | fifth_bit(high, i)) - taken_off);
    }
}

void read_q4_0(const uint8_t *block, Codes &to) {
    to.scale[0] = load_half(block);
    read_nibbles(block + 2, to.code);
}

void read_q4_1(const uint8_t *block, Codes &to) {
    to.scale[0] = load_half(block);
    to.minimum[0] = load_half(block + 2);
    read_nibbles(block + 4, to.code);
}

void read_q8_0(const uint8_t *block, Codes &to) {
    to.scale[0] = load_half(block);
    std::memcpy(to.code, block + 2, 32);
}

void read_q5_0(const uint8_t *block, Codes &to) {
    to.scale[0] = load_half(block);
    read_fives(load_u32(block + 2), block + 6, 16, to.code);
}

void read_q5_1(const uint8_t *block, Codes &to) {
    to.scale[0] = load_half(block);
    to.minimum[0] = load_half(block + 2);
    read_fives(load_u32(block + 4), block + 8, 0, to.code);
}

void read_k45(const uint8_t *block, const uint8_t *high, const uint8_t *q, Codes &to) {
    const float d = load_half(block), d_least = load_half(block + 2);
    uint8_t scales[8], minima[8];
    unpack_scales(block + 4, scales, minima);
    for (int run = 0; run < 8; ++run) {
        to.scale[run] = d * static_cast<float>(scales[run]);
        to.minimum[run] = -d_least * static_cast<float>(minima[run]);
        for (int i = 0; i < 32; ++i) {
            int code = (q[run / 2 * 32 + i] >> ((run & 1) * 4)) & 15;
            if (high) code |= ((high[i] >> run) & 1) << 4;
            to.code[run * 32 + i] = static_cast<int8_t>(code);
        }
    }
}

void read_q4_k(const uint8_t *block, Codes &to) { read_k45(block, nullptr, block + 16, to); }
void read_q5_k(const uint8_t *block, Codes &to) { read_k45(block, block + 16, block + 48, to); }

void read_q6_k(const uint8_t *block, Codes &to) {
    const auto *scales = reinterpret_cast<const int8_t *>(block + 192);
    const float d = load_half(block + 208);
    for (int i = 0; i < 16; ++i) to.scale[i] = d * static_cast<float>(scales[i]);
    for (int i = 0; i < 256; ++i) {
        const int half = i / 128, part = i / 32 % 4, at = i % 32;
        const int low = block[half * 64 + (part & 1) * 32 + at] >> (part / 2 * 4) & 15;
        const int high = block[128 + half * 32 + at] >> (2 * part) & 3;
        to.code[i] = static_cast<int8_t>((low | high << 4) - 32);
    }
}

//   type, nibbles, wide scales, minimum, zero, group    block: columns, bytes
constexpr Source kSources[] = {
    {{"Q4_0", true, false, false, 8, 32}, 32, 18, read_q4_0},
    {{"Q4_1", true, false, true, 0, 32}, 32, 20, read_q4_1},
    {{"Q8_0", false, false, false, 0, 32}, 32, 34, read_q8_0},
    {{"Q5_0", false, false, false, 0, 32}, 32, 22, read_q5_0},
    {{"Q5_1", false, false, true, 0, 32}, 32, 24, read_q5_1},
    {{"Q4_K", true, true, true, 0, 32}, 256, 144, read_q4_k},
    {{"Q5_K", false, true, true, 0, 32}, 256, 176, read_q5_k},
    {{"Q6_K", false, true, false, 0, 16}, 256, 210, read_q6_k},
};

const Source *find_source(const char *type) {
    for (const Source &source : kSources) {
        if (!std::strcmp(source.form.type, type)) return &source;
    }
    return nullptr;
}

void put_code(const PackedForm &form, uint8_t *group, int64_t row, int64_t column, int8_t code) {
    const int64_t quad = column / 4, at = row * 4 + column % 4;
    if (!form.has_nibbles) {
        group[quad * 64 + at] = static_cast<uint8_t>(code);
        return;
    }
    const int bits = quad < 4 ? code : code << 4;
    uint8_t &byte = group[quad % 4 * 64 + at];
    byte = static_cast<uint8_t>(byte | bits);
}

int get_code(const PackedForm &form, const uint8_t *group, int64_t row, int64_t column) {
    const int64_t quad = column / 4, at = row * 4 + column % 4;
    if (!form.has_nibbles) return static_cast<int8_t>(group[quad * 64 + at]);
    return group[quad % 4 * 64 + at] >> (quad < 4 ? 0 : 4) & 15;
}

// fp16 scales come from fp16 numbers, so that nothing is rounded.
void put_scale(const PackedForm &form, uint8_t *scales, int64_t index, float value) {
    if (form.has_wide_scales) {
        std::memcpy(scales + index * 4, &value, 4);
    } else {
        const uint16_t half = exact_half(value);
        std::memcpy(scales + index * 2, &half, 2);
    }
}

float get_scale(const PackedForm &form, const uint8_t *scales, int64_t index) {
    if (!form.has_wide_scales) return load_half(scales + index * 2);
    float value;
    std::memcpy(&value, scales + index * 4, 4);
    return value;
}

struct Strip {
    uint8_t *codes, *scales, *minima;
};

void put_row(const Source &source, const uint8_t *blocks, int64_t k, int64_t row,
             const Strip &strip) {
    const PackedForm &form = source.form;
    const int64_t in_block = source.block_columns / form.group_columns;
    for (int64_t b = 0; b < k / source.block_columns; ++b) {
        Codes codes = {};
        source.read(blocks + b * source.block_bytes, codes);
        for (int64_t g = 0; g < in_block; ++g) {
            const int64_t group = b * in_block + g;
            const int8_t *from = codes.code + g * form.group_columns;
            uint8_t *to = strip.codes + group * form.code_bytes();
            for (int64_t i = 0; i < form.group_columns; ++i) put_code(form, to, row, i, from[i]);
            put_scale(form, strip.scales, group * kStripRows + row, codes.scale[g]);
            if (!form.has_minimum) continue;
            put_scale(form, strip.minima, group * kStripRows + row, codes.minimum[g]);
        }
    }
}

void get_row(const PackedWeights &weights, int64_t id, float *out) {
    const PackedForm &form = *weights.form;
    const int64_t strip = id / kStripRows, row = id % kStripRows;
    for (int64_t g = 0; g < weights.num_groups(); ++g) {
        const int64_t at = g * kStripRows + row;
        const uint8_t *codes = weights.codes(strip) + g * form.code_bytes();
        const float scale = get_scale(form, weights.scales(strip), at);
        const float minimum =
            form.has_minimum ? get_scale(form, weights.minima(strip), at) : 0.0f;
        for (int64_t i = 0; i < form.group_columns; ++i) {
            const int code = get_code(form, codes, row, i) - form.zero;
            *out++ = scale * static_cast<float>(code) + minimum;
        }
    }
}

}  // namespace

const PackedForm *find_packed_form(const char *gguf_type) {
    const Source *source = find_source(gguf_type);
    return source ? &source->form : nullptr;
}

void pack_weights(const PackedForm &form, const uint8_t *rows, int64_t num_rows, int64_t k,
                  uint8_t *strips) {
    const Source &source = *find_source(form.type);
    const int64_t row_bytes = k / source.block_columns * source.block_bytes;
    const PackedWeights layout{&form, strips, num_rows, k};
    parallel_for(num_strips(num_rows), [&](int64_t i) {
        uint8_t *start = strips + i * form.strip_bytes(k);
        std::memset(start, 0, static_cast<size_t>(form.strip_bytes(k)));
        const Strip strip{start, start + (layout.scales(i) - layout.codes(i)),
                          start + (layout.minima(i) - layout.codes(i))};
        for (int64_t row = 0; row < kStripRows && i * kStripRows + row < num_rows; ++row) {
            put_row(source, rows + (i * kStripRows + row) * row_bytes, k, row, strip);
        }
    });
}

void unpack_rows(const PackedWeights &weights, const int64_t *ids, int64_t num_ids, float *out) {
    parallel_for((num_ids + 63) / 64, [&](int64_t piece) {
        const int64_t end = piece * 64 + 64 < num_ids ? piece * 64 + 64 : num_ids;
        for (int64_t i = piece * 64; i < end; ++i) get_row(weights, ids[i], out + i * weights.k);
    });
}

}  // namespace pagemill
