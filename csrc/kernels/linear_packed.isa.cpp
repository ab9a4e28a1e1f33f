// x [T, K] times weights that stay packed (packed_weights.hpp).
//
// x becomes integers of 12 or 15 bits, with a scale for each token and 32 columns. Sums over a
// group of weights are exact integers; scales are applied to them. Lanes are weight rows. So a
// token's result has the same bits with vectors and with matrix tiles, alone or in company.
#include "kernels/linear_packed_amx.hpp"

namespace pagemill::PAGEMILL_ISA {
namespace {

// ---------------------------------------------------------------- x

// 16 codes of a token into its words; `half` 0 or 1 of the 32.
void put_codes(const int32_t *codes, int bits, int half, int32_t *words) {
#if defined(__AVX512VNNI__)
    const __m512i all = _mm512_loadu_si512(codes), round = _mm512_set1_epi32(1 << (bits - 1));
    const __m128i shift = _mm_cvtsi32_si128(bits);
    const __m512i sum = _mm512_maskz_add_epi32(0xffff, all, round);
    const __m512i high = _mm512_maskz_sra_epi32(0xffff, sum, shift);
    const __m512i low =
        _mm512_maskz_sub_epi32(0xffff, all, _mm512_maskz_sll_epi32(0xffff, high, shift));
    auto *to = reinterpret_cast<__m128i *>(words);
    _mm_storeu_si128(to + half, _mm512_maskz_cvtepi32_epi8(0xffff, high));
    _mm_storeu_si128(to + 2 + half, _mm512_maskz_cvtepi32_epi8(0xffff, low));
#else
    (void)bits;
    for (int quad = 0; quad < 4; ++quad) {
        const int32_t *four = codes + 4 * quad;
        int32_t *to = words + half * 8 + 2 * quad;
        to[0] = (four[0] & 0xffff) | static_cast<int32_t>(uint32_t(four[2]) << 16);
        to[1] = (four[1] & 0xffff) | static_cast<int32_t>(uint32_t(four[3]) << 16);
    }
#endif
}

// The integers that 16 values are nearest to; returns their sum.
int32_t code_row(const Row &row, Vec factor, int32_t *codes) {
    Vec total{};
    for (int i = 0; i < kParts; ++i) {
        const IntVec code = to_int(row.part[i] * factor);
        std::memcpy(codes + i * kLanes, &code, sizeof code);
        total += to_float(code);
    }
    return static_cast<int32_t>(sum(total));  // at most 16 * 2^14: exact
}

// The largest magnitude of two rows, NaN where there is one.
float largest_of(const Row &a, const Row &b) {
    Row both;
    for (int i = 0; i < kParts; ++i) {
        const IntVec x = reinterpret_cast<IntVec>(as_bits(a.part[i]) & 0x7fffffffu);
        const IntVec y = reinterpret_cast<IntVec>(as_bits(b.part[i]) & 0x7fffffffu);
        both.part[i] = reinterpret_cast<Vec>(x > y ? x : y);
    }
    return largest_or_nan(both);
}

void pack_token(const float *x, int bits, TokenBlock &block, int64_t token) {
    const Row rows[2] = {load_row(x), load_row(x + 16)};
    const float most = largest_of(rows[0], rows[1]), levels = static_cast<float>(127 << bits);
    const bool is_finite = most - most == 0, is_coded = is_finite && most >= 1e-30f;
    const Vec factor = broadcast(is_coded ? levels / most : 0.0f);
    alignas(64) int32_t codes[2][16] = {};
    int32_t sums[2] = {};
    for (int half = 0; half < 2; ++half) {
        if (is_coded) sums[half] = code_row(rows[half], factor, codes[half]);
        put_codes(codes[half], bits, half, block.words[token]);
        block.starts[half][token] = -128 * sums[half];
    }
    const float scale = is_coded ? most / levels : is_finite ? 0.0f : most - most;  // NaN
    block.scales[token] = scale;
    block.sums[token] = scale * static_cast<float>(sums[0] + sums[1]);
    block.starts[2][token] = -128 * (sums[0] + sums[1]);
}

// ---------------------------------------------------------------- vectors

template <int kBits>
IntVec dot_group(const BitVec *lines, int num_quads, const int32_t *words, int first_quad,
                 int32_t start) {
    IntVec low = IntVec{} + start;
#if defined(__AVX512VNNI__)
    IntVec high{};
    for (int i = 0; i < num_quads; ++i) {
        const Quad of_high{{IntVec{} + words[first_quad + i]}};
        const Quad of_low{{IntVec{} + words[8 + first_quad + i]}};
        high = dot_unsigned(high, lines[i], of_high);
        low = dot_unsigned(low, lines[i], of_low);
    }
    return (high << kBits) + low;
#else
    for (int i = 0; i < num_quads; ++i) {
        low = dot_unsigned(low, lines[i], load_quad(words + 2 * (first_quad + i)));
    }
    return low;
#endif
}

// The lines of a group as unsigned bytes, `part` of the 16 rows.
template <class Form>
void load_lines(const uint8_t *codes, int part, BitVec *lines) {
    for (int i = 0; i < Form::kQuads; ++i) {
        if constexpr (Form::kHasNibbles) {
            const BitVec bits = load_bits(codes + i % 4 * 64 + part * 4 * kLanes);
            lines[i] = (i < 4 ? bits : bits >> 4) & 0x0f0f0f0fu;
        } else {
            lines[i] = load_bits(codes + i * 64 + part * 4 * kLanes) ^ 0x80808080u;
        }
    }
}

constexpr int64_t kAheadBytes = 4096;

template <class Form, int kTokens>
void multiply_lanes(const PackedCall &call, int64_t strip, int part, int64_t token) {
    const PackedWeights &weights = call.weights;
    const PackedForm &form = *weights.form;
    const int64_t num_groups = weights.num_groups(), num_blocks = weights.k / kBlockColumns;
    const TokenBlock *x = call.x + token / kTokensOfBlock * num_blocks;
    const int64_t at = token % kTokensOfBlock;
    const uint8_t *codes = weights.codes(strip);
    const ScaleReader scales(weights, strip);
    Vec acc[kTokens] = {};
    for (int64_t g = 0; g < num_groups; ++g, codes += form.code_bytes()) {
        const TokenBlock &block = x[g * Form::kQuads / 8];
        const int half = Form::kQuads == 8 ? 2 : static_cast<int>(g % 2);
        const int first_quad = half == 1 ? 4 : 0;
        for (int64_t i = 0; i < form.code_bytes(); i += 64) prefetch(codes + kAheadBytes + i);
        BitVec lines[Form::kQuads];
        load_lines<Form>(codes, part, lines);
        const Vec scale = scales.scale(g, part);
        Vec offset{};
        if constexpr (Form::kHasOffset) offset = scales.offset(g, part, scale);
        unroll<kTokens>([&](auto t) {
            const int32_t start = Form::kHasNibbles ? 0 : block.starts[half][at + t];
            const IntVec sum = dot_group<Form::kBits>(lines, Form::kQuads, block.words[at + t],
                                                      first_quad, start);
            const Vec scaled = to_float(sum) * scale;
            acc[t] = fma(scaled, broadcast(block.scales[at + t]), acc[t]);
            if constexpr (Form::kHasOffset) {
                acc[t] = fma(offset, broadcast(block.sums[at + t]), acc[t]);
            }
        });
    }
    const int64_t row = strip * kStripRows + part * kLanes;
    const int64_t count = smaller(int64_t{kLanes}, weights.num_rows - row);
    if (count <= 0) return;
    unroll<kTokens>([&](auto t) {
        store_some(call.out + (token + t) * call.out_stride + row, acc[t], count);
    });
}

template <class Form, int kTokens>
void multiply_parts(const PackedCall &call, int64_t strip, int64_t token) {
    for (int part = 0; part < kParts; ++part) {
        multiply_lanes<Form, kTokens>(call, strip, part, token);
    }
}

constexpr int kMostTokens = kVectorRegisters == 32 ? 8 : 4;

template <class Form>
void multiply_strip(const PackedCall &call, int64_t strip, int64_t first_token) {
    int64_t t = first_token;
    const int64_t end = call.num_tokens;
    for (; t + kMostTokens <= end; t += kMostTokens) {
        multiply_parts<Form, kMostTokens>(call, strip, t);
    }
    if (kMostTokens > 4 && t + 4 <= end) {
        multiply_parts<Form, 4>(call, strip, t);
        t += 4;
    }
    if (t + 2 <= end) {
        multiply_parts<Form, 2>(call, strip, t);
        t += 2;
    }
    if (t < end) multiply_parts<Form, 1>(call, strip, t);
}

template <class Form>
void multiply_strips(const PackedCall &call, int64_t begin, int64_t end, float *scratch) {
    const ByteTiles<Form> tiles(call.num_tokens);
    for (int64_t strip = begin; strip < end; ++strip) {
        const int64_t done = tiles.multiply_strip(call, strip, scratch);
        multiply_strip<Form>(call, strip, done);
    }
}

// ---------------------------------------------------------------- back to wide numbers

// 32 or 16 codes of a row, which lie in dwords 64 bytes apart, as they are or less `zero`.
template <class Form>
void read_codes(const uint8_t *codes, int64_t row, Row *values) {
    alignas(16) uint8_t bytes[32];
    for (int i = 0; i < Form::kQuads; ++i) {
        uint32_t quad;
        if constexpr (Form::kHasNibbles) {
            std::memcpy(&quad, codes + i % 4 * 64 + row * 4, 4);
            quad = (i < 4 ? quad : quad >> 4) & 0x0f0f0f0fu;
        } else {
            std::memcpy(&quad, codes + i * 64 + row * 4, 4);
            quad ^= 0x80808080u;
        }
        std::memcpy(bytes + 4 * i, &quad, 4);
    }
    const int32_t bias = Form::kHasNibbles ? 0 : 128;
    for (int i = 0; i < Form::kQuads * 4; i += kLanes) {
        alignas(16) uint8_t lanes[16] = {};
        std::memcpy(lanes, bytes + i, kLanes);
        const IntVec code = reinterpret_cast<IntVec>(load_byte_lanes(lanes)) - bias;
        values[i / 16].part[i % 16 / kLanes] = to_float(code);
    }
}

void store_bf16(Vec value, uint16_t *out) {
#if defined(__AVX512F__)
    const BitVec bits = as_bits(value);
    const BitVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(out),
                        _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)rounded));
#else
    for (int i = 0; i < kLanes; ++i) out[i] = to_bf16(value[i]);
#endif
}

void store_wide(Vec value, uint16_t *out) { store_bf16(value, out); }
void store_wide(Vec value, float *out) { store(out, value); }

template <class Form, class Out>
void unpack_strip(const PackedWeights &weights, int64_t strip, int64_t num_rows, Out *out) {
    const PackedForm &form = *weights.form;
    const ScaleReader scales(weights, strip);
    const uint8_t *codes = weights.codes(strip);
    for (int64_t g = 0; g < weights.num_groups(); ++g, codes += form.code_bytes()) {
        float scale[16], offset[16] = {};
        for (int part = 0; part < kParts; ++part) {
            const Vec one = scales.scale(g, part);
            store(scale + part * kLanes, one);
            if (Form::kHasOffset) store(offset + part * kLanes, scales.offset(g, part, one));
        }
        for (int64_t row = 0; row < num_rows; ++row) {
            Row values[2];
            read_codes<Form>(codes, row, values);
            Out *to = out + row * weights.k + g * form.group_columns;
            for (int i = 0; i < Form::kQuads * 4; i += kLanes) {
                const Vec code = values[i / 16].part[i % 16 / kLanes];
                store_wide(fma(code, broadcast(scale[row]), broadcast(offset[row])), to + i);
            }
        }
    }
}

template <class Out>
void unpack_strips(const PackedWeights &weights, int64_t begin, int64_t end, Out *out) {
    const PackedForm &form = *weights.form;
    for (int64_t strip = begin; strip < end; ++strip, out += kStripRows * weights.k) {
        const int64_t rows = smaller(kStripRows, weights.num_rows - strip * kStripRows);
        if (form.has_nibbles) {
            unpack_strip<Nibbles>(weights, strip, rows, out);
        } else if (form.group_columns == 16) {
            unpack_strip<ShortBytes>(weights, strip, rows, out);
        } else if (form.has_minimum) {
            unpack_strip<BytesAndMinimum>(weights, strip, rows, out);
        } else {
            unpack_strip<Bytes>(weights, strip, rows, out);
        }
    }
}

}  // namespace

void unpack_to_bf16(const PackedWeights &weights, int64_t begin, int64_t end, uint16_t *out) {
    unpack_strips(weights, begin, end, out);
}

void unpack_to_float(const PackedWeights &weights, int64_t begin, int64_t end, float *out) {
    unpack_strips(weights, begin, end, out);
}

// Token blocks [begin, end) of 16 tokens; lanes behind the last token are zero.
void pack_tokens(const float *x, int64_t x_stride, int64_t num_tokens, int64_t k, bool has_nibbles,
                 TokenBlock *blocks, int64_t begin, int64_t end) {
    const int64_t num_blocks = k / kBlockColumns;
    const int bits = has_nibbles ? kNibbleBits : kByteBits;
    for (int64_t tile = begin; tile < end; ++tile) {
        const int64_t first = tile * kTokensOfBlock;
        const int64_t count = smaller(kTokensOfBlock, num_tokens - first);
        TokenBlock *to = blocks + tile * num_blocks;
        for (int64_t i = 0; i < num_blocks; ++i) {
            if (count < kTokensOfBlock) std::memset(to + i, 0, sizeof *to);
            for (int64_t t = 0; t < count; ++t) {
                pack_token(x + (first + t) * x_stride + i * kBlockColumns, bits, to[i], t);
            }
        }
    }
}

int64_t packed_scratch_floats(int64_t k) { return tile_scratch_floats(k); }

void linear_packed(const PackedCall &call, int64_t begin, int64_t end, float *scratch) {
    const PackedForm &form = *call.weights.form;
    if (form.has_nibbles) return multiply_strips<Nibbles>(call, begin, end, scratch);
    if (form.group_columns == 16) return multiply_strips<ShortBytes>(call, begin, end, scratch);
    if (form.has_minimum) return multiply_strips<BytesAndMinimum>(call, begin, end, scratch);
    multiply_strips<Bytes>(call, begin, end, scratch);
}

}  // namespace pagemill::PAGEMILL_ISA
