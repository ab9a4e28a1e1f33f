// 4-bit codes: V of one token in planes of 64 channels, K of a whole group by channel.
//
// A code stands for minimum + code * scale. Three scales are tried, each with the minimum that
// makes the mean error 0, and the one with the smallest squared error is taken (codec.py says why).
// Sums have the order of codec.py, and no product is contracted into a sum: the same bits.
#pragma once

#include "kernels/kv_format.hpp"
#include "kernels/numbers.hpp"

namespace pagemill::PAGEMILL_ISA {

static inline Vec clamped(Vec x, float low, float high) {
    x = x > broadcast(high) ? broadcast(high) : x;
    return x < broadcast(low) ? broadcast(low) : x;
}

// To the nearest integer, ties to even; |x| < 2^22.
static inline Vec rounded(Vec x) { return (x + broadcast(12582912.0f)) - broadcast(12582912.0f); }

static inline void put_f16(uint8_t *meta, int place, uint16_t half) {
    std::memcpy(meta + 2 * place, &half, 2);
}

static inline float within_f16(float x) {
    return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x;
}

static inline Vec code4(Vec x, Vec low, Vec scale) {
    return rounded(clamped((x - low) / scale, 0, 15));
}

// 16 sums, and these by halves.
static inline float tree_sum(Row row) {
    for (int count = kParts; count > 1; count /= 2) {
        for (int i = 0; i < count / 2; ++i) row.part[i] += row.part[i + count / 2];
    }
    return sum(row.part[0]);
}

struct Range {
    float low, high;
    bool is_finite;
};

static inline Range range_of(const float *x, int64_t count) {
    Vec low = load(x), high = low, rest{};
    for (int64_t i = 0; i < count; i += kLanes) {
        const Vec value = load(x + i);
        low = value < low ? value : low;
        high = larger(high, value);
        rest += value - value;
    }
    return {-largest(-low) + 0.0f, largest(high) + 0.0f, sum(rest) == 0.0f};
}

// fn(part of the row, place in it) over a plane of `count` channels, summed as codec.py sums.
template <typename Fn>
static inline float sum_plane(int64_t count, const Fn &fn) {
    Row total = splat_row(0.0f);
    for (int64_t i = 0; i < count; i += 16) {
        for (int p = 0; p < kParts; ++p) {
            const Vec value = fn(i + p * kLanes);
            total.part[p] = i ? total.part[p] + value : value;
        }
    }
    return tree_sum(total);
}

struct Choice {
    float error;
    uint16_t scale, low;
};

static inline Choice try_scale(const float *x, int64_t count, float middle, float step,
                               float factor) {
    Choice choice = {};
    choice.scale = to_f16(step * factor > 65504.0f ? 65504.0f : step * factor);
    const float scale = from_f16(choice.scale);
    const Vec wide = broadcast(scale), used = broadcast(scale > 0 ? scale : 1.0f);
    auto code = [&](Vec value, Vec low) { return scale > 0 ? code4(value, low, used) : Vec{}; };
    const Vec first = broadcast(middle - 7.5f * (scale > 0 ? scale : 1.0f));
    const float rest = sum_plane(count, [&](int64_t i) {
        return load(x + i) - code(load(x + i), first) * wide;
    });
    choice.low = to_f16(within_f16(rest / static_cast<float>(count) + 0.0f));
    const Vec low = broadcast(from_f16(choice.low));
    choice.error = sum_plane(count, [&](int64_t i) {
        const Vec value = load(x + i), error = code(value, low) * wide + low - value;
        return error * error;
    });
    return choice;
}

static inline Choice choose_scale(const float *x, int64_t count) {
    const Range range = range_of(x, count);
    if (!range.is_finite) return {0.0f, 0x7e00, 0};
    const float middle = (range.low + range.high) * 0.5f, step = (range.high - range.low) / 15.0f;
    Choice best = try_scale(x, count, middle, step, 1.0f);
    for (int sixteenths = 15; sixteenths >= 14; --sixteenths) {
        const float factor = static_cast<float>(sixteenths) / 16.0f;
        const Choice found = try_scale(x, count, middle, step, factor);
        if (found.error < best.error) best = found;
    }
    return best;
}

// V of one token in planes of 64 channels: line p of `meta` holds 16 scales and 16 minima.
static inline void put_value4(uint8_t *meta, uint8_t *values, int lane, const float *v,
                              int64_t dim) {
    float codes[kMaxHeadDim];
    for (int64_t first = 0; first < dim; first += kPlaneChannels, meta += 64) {
        const int64_t count = smaller(int64_t{kPlaneChannels}, dim - first);
        const Choice choice = choose_scale(v + first, count);
        put_f16(meta, lane, choice.scale);
        put_f16(meta, 16 + lane, choice.low);
        const float scale = from_f16(choice.scale);
        const Vec low = broadcast(from_f16(choice.low)), wide = broadcast(scale);
        for (int64_t i = 0; i < count; i += kLanes) {
            const Vec value = load(v + first + i);
            store(codes + first + i, scale > 0 ? code4(value, low, wide) : Vec{});
        }
    }
    const int line = lane / 4 % 2, shift = lane / 8 * 4;
    values += line * 64 + lane % 4;
    for (int64_t c = 0; c < dim; ++c) {
        uint8_t &byte = values[c / 16 * 128 + c % 16 * 4];
        byte = static_cast<uint8_t>((byte & (0xf0 >> shift)) |
                                    static_cast<int>(codes[c]) << shift);
    }
}

// kLanes channels of a group of keys, rows [16][dim].
struct Channels {
    const float *rows;
    int64_t dim;
    Vec at(int t) const { return load(rows + t * dim); }

    template <typename Fn>
    Vec sum(const Fn &fn) const {
        Vec total = fn(at(0));
        for (int t = 1; t < kGroupTokens; ++t) total += fn(at(t));
        return total;
    }
};

static inline Vec f16_of_each(Vec x, uint16_t *halves) {
    float values[kLanes];
    store(values, x);
    for (int i = 0; i < kLanes; ++i) {
        halves[i] = to_f16(within_f16(values[i] + 0.0f));
        values[i] = from_f16(halves[i]);
    }
    return load(values);
}

static inline BitVec scale_bytes(Vec spread) {
    float values[kLanes];
    store(values, spread);
    BitVec bytes;
    for (int i = 0; i < kLanes; ++i) bytes[i] = scale_byte(values[i]);
    return bytes;
}

// The scale byte and the minimum of kLanes channels whose values are finite.
static inline void choose_channels(const Channels &keys, uint8_t *bytes, uint16_t *minima) {
    Vec low = keys.at(0), high = low, least{};
    for (int t = 1; t < kGroupTokens; ++t) {
        low = keys.at(t) < low ? keys.at(t) : low;
        high = larger(high, keys.at(t));
    }
    low += broadcast(0.0f);
    high += broadcast(0.0f);
    const Vec middle = (low + high) * broadcast(0.5f);
    const BitVec first = scale_bytes((high - low) / broadcast(15.0f));
    for (uint32_t smaller_by = 0; smaller_by < 3; ++smaller_by) {
        uint16_t halves[kLanes];
        const BitVec byte = first > smaller_by ? first - smaller_by : BitVec{};
        const Vec scale = scale_of_bytes(byte), start = middle - broadcast(7.5f) * scale;
        const Vec rest =
            keys.sum([&](Vec x) { return x - code4(x, start, scale) * scale; });
        const Vec minimum = f16_of_each(rest * broadcast(0.0625f), halves);
        const Vec error = keys.sum([&](Vec x) {
            const Vec e = code4(x, minimum, scale) * scale + minimum - x;
            return e * e;
        });
        for (int i = 0; i < kLanes; ++i) {
            if (smaller_by && !(error[i] < least[i])) continue;
            least[i] = error[i];
            bytes[i] = static_cast<uint8_t>(byte[i]);
            minima[i] = halves[i];
        }
    }
}

// K of a whole group, from rows [16][dim]: a scale and a minimum for each channel.
static inline void put_keys4(uint8_t *meta, uint8_t *keys, float *rows, int64_t dim) {
    std::memset(keys, 0, static_cast<size_t>(8 * dim));
    std::memset(meta, 0, static_cast<size_t>(i4c_key_meta(dim)));
    for (int64_t c = 0; c < dim; c += kLanes) {
        const Channels channels = {rows + c, dim};
        const Vec lost = channels.sum([](Vec x) { return x - x; });  // 0 where all are finite
        for (int i = 0; i < kLanes; ++i) {
            for (int t = 0; t < kGroupTokens && lost[i] != 0.0f; ++t) rows[t * dim + c + i] = 0.0f;
        }
        uint16_t minima[kLanes];
        choose_channels(channels, meta + c, minima);
        Vec low;
        for (int i = 0; i < kLanes; ++i) {
            low[i] = from_f16(minima[i]);
            if (lost[i] != 0.0f) minima[i] = 0x7e00;
        }
        std::memcpy(meta + dim + 2 * c, minima, sizeof minima);
        const Vec scale = scale_of_bytes(load_byte_lanes(meta + c));
        for (int t = 0; t < kGroupTokens; ++t) {
            const Vec code = code4(channels.at(t), low, scale);
            for (int i = 0; i < kLanes; ++i) {
                const int64_t channel = c + i;
                uint8_t &byte = keys[channel / 8 * 64 + channel % 4 + t * 4];
                const int shift = static_cast<int>(channel / 4 % 2 * 4);
                byte = static_cast<uint8_t>(byte | static_cast<int>(code[i]) << shift);
            }
        }
    }
}

}  // namespace pagemill::PAGEMILL_ISA
