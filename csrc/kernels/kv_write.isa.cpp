// Storing K and V of new tokens into their tiles, in every KV format. codec.py defines the bytes.
//
// A row is prepared first - the center taken off a key, K or V rotated where the format says so -
// and then coded from its own values alone: equal rows give equal bytes in any company.
#include "kernels/codes4.hpp"
#include "kernels/entry_points.hpp"
#include "kernels/kv_lines.hpp"

namespace pagemill::PAGEMILL_ISA {
namespace {

// A key minus its center, or a value, rotated where asked.
void prepare(const float *row, const float *center, bool rotates, int64_t dim, float *out) {
    for (int64_t i = 0; i < dim; i += kLanes) {
        store(out + i, center ? load(row + i) - load(center + i) : load(row + i));
    }
    if (rotates) hadamard(out, dim);
}

// ---------------------------------------------------------------- fp32 and bf16

// `lane` is the token's place in its group: K keeps tokens side by side, V channels.
template <typename Lines>
void put_key(uint8_t *keys, int lane, const float *k, int64_t dim) {
    for (int64_t pair = 0; pair < dim / 2; ++pair) {
        Lines::put(keys, pair, lane, k[2 * pair], k[2 * pair + 1]);
    }
}

template <typename Lines>
void put_value(uint8_t *values, int lane, const float *v, int64_t dim) {
    values += lane / 2 * Lines::kPairBytes;
    for (int64_t column = 0; column < dim / 16; ++column) {
        uint8_t *line = values + column * kValuePairs * Lines::kPairBytes;
        for (int i = 0; i < 16; ++i) Lines::put_one(line, 0, i, lane % 2, v[column * 16 + i]);
    }
}

// ---------------------------------------------------------------- a scale per token

// The largest magnitude of a row, NaN where a value is not finite.
float top_of(const float *x, int64_t dim) {
    Vec top{}, rest{};  // x - x is 0 for finite numbers, NaN for others
    for (int64_t i = 0; i < dim; i += kLanes) {
        const Vec value = load(x + i);
        top = larger(top, larger(value, -value));
        rest += value - value;
    }
    const float lost = sum(rest);
    return lost == 0.0f ? largest(top) : lost;
}

uint16_t scale_of(float top, float largest_code) {
    const float scale = top / largest_code + 0.0f;  // no negative zero
    return to_f16(scale > 65504.0f ? 65504.0f : scale);
}

// x / scale; 0 where the scale is 0 or NaN.
Vec divided(const float *x, float scale) {
    return scale > 0 ? load(x) / broadcast(scale) : Vec{};
}

// Codes of 8 bits, as numbers from -127 to 127.
void code_row(const float *x, float scale, int64_t dim, float *codes) {
    for (int64_t i = 0; i < dim; i += kLanes) {
        store(codes + i, rounded(clamped(divided(x + i, scale), -127.0f, 127.0f)));
    }
}

// K bytes [D / 4][16 tokens][4 channels], V bytes [D / 16][4 quads][16 channels][4 tokens].
template <typename Fn>
void scatter_key(uint8_t *keys, int lane, int64_t dim, const Fn &byte_of) {
    for (int64_t c = 0; c < dim; ++c) keys[c / 4 * 64 + lane * 4 + c % 4] = byte_of(c);
}

template <typename Fn>
void scatter_value(uint8_t *values, int lane, int64_t dim, const Fn &byte_of) {
    values += lane / 4 * 64 + lane % 4;
    for (int64_t c = 0; c < dim; ++c) values[c / 16 * 256 + c % 16 * 4] = byte_of(c);
}

void put_key8(uint8_t *meta, uint8_t *keys, int lane, const float *k, int64_t dim) {
    float codes[kMaxHeadDim];
    const uint16_t scale = scale_of(top_of(k, dim), 127.0f);
    put_f16(meta, lane, scale);
    code_row(k, from_f16(scale), dim, codes);
    scatter_key(keys, lane, dim,
                [&](int64_t c) { return static_cast<uint8_t>(static_cast<int>(codes[c]) + 128); });
}

void put_value8(uint8_t *meta, uint8_t *values, int lane, const float *v, int64_t dim) {
    float codes[kMaxHeadDim];
    const uint16_t scale = scale_of(top_of(v, dim), 127.0f);
    put_f16(meta, 16 + lane, scale);
    code_row(v, from_f16(scale), dim, codes);
    scatter_value(values, lane, dim,
                  [&](int64_t c) { return static_cast<uint8_t>(static_cast<int>(codes[c])); });
}

void put_f8(uint8_t *meta, uint8_t *keys, uint8_t *values, int lane, const float *k,
            const float *v, int64_t dim) {
    const float *rows[2] = {k, v};
    for (int which = 0; which < 2; ++which) {
        float codes[kMaxHeadDim];
        const uint16_t scale = scale_of(top_of(rows[which], dim), 448.0f);
        put_f16(meta, which * 16 + lane, scale);
        for (int64_t i = 0; i < dim; i += kLanes) {
            store(codes + i, clamped(divided(rows[which] + i, from_f16(scale)), -448.0f, 448.0f));
        }
        auto byte_of = [&](int64_t c) { return to_e4m3(codes[c]); };
        if (which == 0) scatter_key(keys, lane, dim, byte_of);
        if (which == 1) scatter_value(values, lane, dim, byte_of);
    }
}

// ---------------------------------------------------------------- formats

struct Place {
    uint8_t *meta, *keys, *values;
};

Place place_of(const KvView &kv, int64_t block, int head, int64_t group_in_block) {
    uint8_t *group = group_at(kv, block, head, group_in_block);
    return {group, group + kv.bytes.meta, group + kv.bytes.meta + kv.bytes.k};
}

void put_token(KvFormat format, const Place &at, int lane, const float *k, const float *v,
               int64_t dim) {
    switch (format) {
        case KvFormat::kFp32:
            put_key<Fp32Lines>(at.keys, lane, k, dim);
            return put_value<Fp32Lines>(at.values, lane, v, dim);
        case KvFormat::kBf16:
            put_key<Bf16Lines>(at.keys, lane, k, dim);
            return put_value<Bf16Lines>(at.values, lane, v, dim);
        case KvFormat::kI8:
            put_key8(at.meta, at.keys, lane, k, dim);
            return put_value8(at.meta, at.values, lane, v, dim);
        case KvFormat::kF8: return put_f8(at.meta, at.keys, at.values, lane, k, v, dim);
        case KvFormat::kK8v4:
            put_key8(at.meta, at.keys, lane, k, dim);
            std::memset(at.meta + 32, 0, 32);
            return put_value4(at.meta + 64, at.values, lane, v, dim);
        case KvFormat::kI4c: return;  // whole groups: write_raw
    }
}

// A row of a head, prepared: k, then v, in `out` [2 dim].
void prepare_token(const KvWrite &write, int64_t row, int head, float *out) {
    const KvView &kv = write.kv;
    const int64_t dim = kv.head_dim, offset = head * dim;
    prepare(write.k + row * write.k_stride + offset, kv.centers ? kv.centers + offset : nullptr,
            rotates_k(kv.format), dim, out);
    prepare(write.v + row * write.v_stride + offset, nullptr, rotates_v(kv.format), dim,
            out + dim);
}

Place raw_place(const KvView &kv, uint8_t *raw, int head) {
    uint8_t *keys = raw + head * raw_head_bytes(kv);
    return {nullptr, keys, keys + group_bytes_of(KvFormat::kBf16, kv.head_dim).k};
}

// Rows [16][dim] of the K and of the V of a raw group.
void read_raw(const Place &raw, int64_t dim, float *keys, float *values) {
    for (int64_t pair = 0; pair < dim / 2; ++pair) {
        float even[16], odd[16];
        store_row(even, Bf16Lines::load_even(raw.keys + pair * 64));
        store_row(odd, Bf16Lines::load_odd(raw.keys + pair * 64));
        for (int t = 0; t < 16; ++t) {
            keys[t * dim + 2 * pair] = even[t];
            keys[t * dim + 2 * pair + 1] = odd[t];
        }
    }
    for (int64_t i = 0; i < dim / 16 * kValuePairs; ++i) {
        const int64_t column = i / kValuePairs, pair = i % kValuePairs;
        float *to = values + 2 * pair * dim + column * 16;
        store_row(to, Bf16Lines::load_even(raw.values + i * 64));
        store_row(to + dim, Bf16Lines::load_odd(raw.values + i * 64));
    }
}

void code_group(const KvView &kv, const RawGroup &group) {
    const int64_t dim = kv.head_dim;
    float rows[2 * kGroupTokens * kMaxHeadDim];
    for (int head = 0; head < kv.num_kv_heads; ++head) {
        const Place at = place_of(kv, group.block, head, group.group_in_block);
        float *values = rows + kGroupTokens * dim;
        read_raw(raw_place(kv, group.raw, head), dim, rows, values);
        put_keys4(at.meta, at.keys, rows, dim);
        for (int t = 0; t < kGroupTokens; ++t) {
            put_value4(at.meta + i4c_key_meta(dim), at.values, t, values + t * dim, dim);
        }
    }
}

}  // namespace

void write_kv(const KvWrite &write, int64_t begin, int64_t end) {
    const KvView &kv = write.kv;
    const int end_head = write.num_heads ? write.first_head + write.num_heads : kv.num_kv_heads;
    float rows[2 * kMaxHeadDim];
    for (int64_t t = begin; t < end; ++t) {
        const int64_t block = write.slots[t] / kv.block_size,
                      offset = write.slots[t] % kv.block_size;
        for (int head = write.first_head; head < end_head; ++head) {
            prepare_token(write, t, head, rows);
            put_token(kv.format, place_of(kv, block, head, offset / kGroupTokens),
                      static_cast<int>(offset % kGroupTokens), rows, rows + kv.head_dim,
                      kv.head_dim);
        }
    }
}

void write_raw(const KvWrite &write, const RawGroup *groups, int64_t begin, int64_t end) {
    const KvView &kv = write.kv;
    const size_t num_bytes = static_cast<size_t>(raw_bytes(kv));
    float rows[2 * kMaxHeadDim];
    for (int64_t i = begin; i < end; ++i) {
        const RawGroup &group = groups[i];
        if (group.before && group.before != group.raw) {
            std::memcpy(group.raw, group.before, num_bytes);
        }
        for (int lane = group.first_lane; lane < group.end_lane; ++lane) {
            for (int head = 0; head < kv.num_kv_heads; ++head) {
                prepare_token(write, group.first_row + lane - group.first_lane, head, rows);
                const Place at = raw_place(kv, group.raw, head);
                put_key<Bf16Lines>(at.keys, lane, rows, kv.head_dim);
                put_value<Bf16Lines>(at.values, lane, rows + kv.head_dim, kv.head_dim);
            }
        }
        if (group.end_lane == kGroupTokens) code_group(kv, group);
    }
}

}  // namespace pagemill::PAGEMILL_ISA
