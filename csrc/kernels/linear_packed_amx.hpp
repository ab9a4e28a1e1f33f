// The packed product on matrix tiles (AMX), and what it shares with the product on vectors.
//
//     sums   [16 tokens][16 weight rows] += x [16 tokens][bytes] * weights [quads][16 rows][4]
//
// Nibbles: high and low part of x stand side by side in a tile row, and so do 16 * w and w: one
// product gives the sums. Bytes have no room for that; their two parts are two products.
#pragma once

#include "kernels/bytes.hpp"
#include "kernels/entry_points.hpp"
#include "kernels/linear_packed.hpp"
#include "kernels/numbers.hpp"
#include "kernels/tile_registers.hpp"

namespace pagemill::PAGEMILL_ISA {

template <bool nibbles, int quads, bool offset>
struct FormOf {
    static constexpr bool kHasNibbles = nibbles, kHasOffset = offset;
    static constexpr int kQuads = quads, kBits = nibbles ? kNibbleBits : kByteBits;
};
using Nibbles = FormOf<true, 8, true>;
using Bytes = FormOf<false, 8, false>;
using BytesAndMinimum = FormOf<false, 8, true>;
using ShortBytes = FormOf<false, 4, false>;

// Scales of a strip: a weight is scale * code + offset.
class ScaleReader {
  public:
    ScaleReader(const PackedWeights &weights, int64_t strip)
        : form_(*weights.form), scales_(weights.scales(strip)), minima_(weights.minima(strip)) {}

    PAGEMILL_INLINE Vec scale(int64_t group, int part) const { return read(scales_, group, part); }

    PAGEMILL_INLINE Vec offset(int64_t group, int part, Vec scale) const {
        if (form_.has_minimum) return read(minima_, group, part);
        return scale * broadcast(static_cast<float>(-form_.zero));
    }

  private:
    PAGEMILL_INLINE Vec read(const uint8_t *p, int64_t group, int part) const {
        p += group * form_.scale_bytes();
        if (form_.has_wide_scales) return load(p + part * 4 * kLanes);
        return load_f16_row(p).part[part];
    }

    const PackedForm &form_;
    const uint8_t *scales_, *minima_;
};

#if defined(__AMX_INT8__)

constexpr int64_t kTileTokens = 5;  // fewer go on vectors
constexpr int64_t kSpreads = 4;     // groups of nibbles as tiles
constexpr int64_t kAhead = 2;       // groups whose sums wait for their scales

inline int64_t tile_scratch_floats(int64_t k) { return k / kBlockColumns * 256; }

//     registers   0 1   sums of a group: of nibbles, or of the high and the low part of x
//                 4 5   x
//                 6     weights
template <class Form>
class ByteTiles {
  public:
    explicit ByteTiles(int64_t num_tokens)
        : is_used_(num_tokens >= kTileTokens), registers_(is_used_, config()) {}

    // All tokens but a last few; returns how many.
    int64_t multiply_strip(const PackedCall &call, int64_t strip, float *scratch) const {
        if (!is_used_) return 0;
        const uint8_t *tiles = tiles_of(call, strip, scratch);
        int64_t t = 0;
        for (; call.num_tokens - t >= kTileTokens; t += kTokensOfBlock) {
            multiply_tile(call, strip, t, tiles);
        }
        return smaller(t, call.num_tokens);
    }

  private:
    static TileConfig config() {
        TileConfig config;
        if (!Form::kHasNibbles) {
            config.row_bytes[4] = config.row_bytes[5] = Form::kQuads * 4;
            config.num_rows[6] = Form::kQuads;
        }
        return config;
    }

    static constexpr int64_t kGroupBytes = Form::kHasNibbles ? 1024 : Form::kQuads * 64;

    PAGEMILL_INLINE static void spread_group(const uint8_t *from, uint8_t *to) {
        for (int i = 0; i < 4; ++i) {
            const BitVec bits = load_bits(from + i * 64);
            const BitVec low = bits & 0x0f0f0f0fu, high = bits & 0xf0f0f0f0u;
            const BitVec low_16 = low << 4, high_1 = high >> 4;
            std::memcpy(to + i * 64, &low_16, 64);
            std::memcpy(to + (i + 4) * 64, &high, 64);
            std::memcpy(to + (i + 8) * 64, &low, 64);
            std::memcpy(to + (i + 12) * 64, &high_1, 64);
        }
    }

    // The codes of a strip as tiles, for several tiles of tokens; nullptr: group by group instead.
    static const uint8_t *tiles_of(const PackedCall &call, int64_t strip, float *scratch) {
        const uint8_t *codes = call.weights.codes(strip);
        if (!Form::kHasNibbles) return codes;
        if (call.num_tokens <= kTokensOfBlock) return nullptr;
        auto *to = reinterpret_cast<uint8_t *>(scratch);
        for (int64_t g = 0; g < call.weights.num_groups(); ++g) {
            spread_group(codes + g * 256, to + g * 1024);
        }
        return to;
    }

    PAGEMILL_INLINE static void multiply_group(const TokenBlock &block, int half,
                                               const uint8_t *codes,
                                               int32_t (&sums)[2][16][16]) {
        const auto *x = reinterpret_cast<const uint8_t *>(block.words);
        _tile_zero(0);
        _tile_loadd(6, codes, 64);
        if constexpr (Form::kHasNibbles) {
            _tile_loadd(4, x, 64);
            _tile_dpbsud(0, 4, 6);
        } else {
            _tile_zero(1);
            _tile_loadd(4, x + half * 16, 64);
            _tile_loadd(5, x + 32 + half * 16, 64);
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 5, 6);
            _tile_stored(1, sums[1], 64);
        }
        _tile_stored(0, sums[0], 64);
    }

    static void multiply_tile(const PackedCall &call, int64_t strip, int64_t token,
                              const uint8_t *tiles) {
        alignas(64) uint8_t spread[kSpreads][1024];
        alignas(64) int32_t sums[kAhead][2][16][16];
        const PackedWeights &weights = call.weights;
        const TokenBlock *x = call.x + token / kTokensOfBlock * (weights.k / kBlockColumns);
        const ScaleReader scales(weights, strip);
        const int64_t num_groups = weights.num_groups();
        Vec acc[16] = {};
        auto spread_one = [&](int64_t g) {  // early: a tile is slow to read what was just written
            if (tiles || g >= num_groups) return;
            spread_group(weights.codes(strip) + g * 256, spread[g % kSpreads]);
        };
        auto multiply = [&](int64_t g) {
            if (g >= num_groups) return;
            spread_one(g + kSpreads - 1);
            const int half = Form::kQuads == 8 ? 0 : static_cast<int>(g % 2);
            const uint8_t *tile = tiles ? tiles + g * kGroupBytes : spread[g % kSpreads];
            multiply_group(x[g * Form::kQuads / 8], half, tile, sums[g % kAhead]);
        };
        for (int64_t g = 0; g < kSpreads - 1; ++g) spread_one(g);
        for (int64_t g = 0; g < kAhead - 1; ++g) multiply(g);
        for (int64_t g = 0; g < num_groups; ++g) {
            multiply(g + kAhead - 1);
            add_sums(x[g * Form::kQuads / 8], scales, g, sums[g % kAhead], acc);
        }
        alignas(64) float results[16][16];
        unroll<16>([&](auto t) { store(results[t], acc[t]); });
        store_tile(call, strip, token, results);
    }

    // The sums of a group times its scales, in the order of multiply_lanes.
    PAGEMILL_INLINE static void add_sums(const TokenBlock &block, const ScaleReader &scales,
                                         int64_t group, const int32_t (&sums)[2][16][16],
                                         Vec (&acc)[16]) {
        const Vec scale = scales.scale(group, 0);
        Vec offset{};
        if constexpr (Form::kHasOffset) offset = scales.offset(group, 0, scale);
        unroll<16>([&](auto t) {
            IntVec sum = reinterpret_cast<IntVec>(load_bits(sums[0][t]));
            if constexpr (!Form::kHasNibbles) {
                sum = (sum << Form::kBits) + reinterpret_cast<IntVec>(load_bits(sums[1][t]));
            }
            const Vec scaled = to_float(sum) * scale;
            acc[t] = fma(scaled, broadcast(block.scales[t]), acc[t]);
            if constexpr (Form::kHasOffset) {
                acc[t] = fma(offset, broadcast(block.sums[t]), acc[t]);
            }
        });
    }

    static void store_tile(const PackedCall &call, int64_t strip, int64_t token,
                           const float (&results)[16][16]) {
        const int64_t row = strip * kStripRows;
        const int64_t rows = smaller(kStripRows, call.weights.num_rows - row);
        const int64_t count = smaller(kTokensOfBlock, call.num_tokens - token);
        const __mmask16 mask = __mmask16(0xffffu >> (16 - rows));
        for (int64_t t = 0; t < count; ++t) {
            _mm512_mask_storeu_ps(call.out + (token + t) * call.out_stride + row, mask,
                                  load(results[t]));
        }
    }

    bool is_used_;
    TileRegisters registers_;
};

#else

inline int64_t tile_scratch_floats(int64_t) { return 0; }

template <class Form>
struct ByteTiles {
    explicit ByteTiles(int64_t) {}
    int64_t multiply_strip(const PackedCall &, int64_t, float *) const { return 0; }
};

#endif

}  // namespace pagemill::PAGEMILL_ISA
