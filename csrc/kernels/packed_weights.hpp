// Weight matrices [N, K] that stay quantized, laid out for dot products of bytes.
//
// The codes are those of the GGUF file, bit for bit; only their places change. 16 rows are a strip:
//
//     strip    [K / group][codes] | [K / group][16 scales] | [K / group][16 minima], up to 64 bytes
//     codes    of a group, 8 bit: [quads of columns][16 rows][4]; 4 bit: lines of 64 bytes as
//              those, quad i in the low nibbles of line i, quad i + 4 in the high ones
//
// A weight is scale * (code - zero) + minimum. 8-bit codes have a sign, 4-bit codes have none.
// Scales and minima are fp16 where the file has them so, float32 where it has products.
#pragma once

#include <cstdint>

namespace pagemill {

constexpr int64_t kStripRows = 16;
constexpr int64_t kBlockColumns = 32;  // columns that share a scale of x

struct PackedForm {
    const char *type;       // of GGUF
    bool has_nibbles;       // 4-bit codes, else 8-bit
    bool has_wide_scales;   // float32, else fp16
    bool has_minimum;
    int zero;               // 8-bit codes have it taken off already
    int64_t group_columns;  // 32 or 16

    int64_t code_bytes() const { return group_columns * kStripRows / (has_nibbles ? 2 : 1); }
    int64_t scale_bytes() const { return kStripRows * (has_wide_scales ? 4 : 2); }
    int64_t strip_bytes(int64_t k) const {
        const int64_t group = code_bytes() + scale_bytes() * (has_minimum ? 2 : 1);
        return (k / group_columns * group + 63) / 64 * 64;
    }
};

// The first `num_rows` rows of a matrix.
struct PackedWeights {
    const PackedForm *form;
    const uint8_t *strips;
    int64_t num_rows, k;

    int64_t num_groups() const { return k / form->group_columns; }
    const uint8_t *codes(int64_t strip) const { return strips + strip * form->strip_bytes(k); }
    const uint8_t *scales(int64_t strip) const {
        return codes(strip) + num_groups() * form->code_bytes();
    }
    const uint8_t *minima(int64_t strip) const {
        return scales(strip) + num_groups() * form->scale_bytes();
    }
};

inline int64_t num_strips(int64_t num_rows) { return (num_rows + kStripRows - 1) / kStripRows; }

const PackedForm *find_packed_form(const char *gguf_type);  // nullptr where there is none

// Rows of whole GGUF blocks to strips; rows that fill up the last strip are zero.
void pack_weights(const PackedForm &form, const uint8_t *rows, int64_t num_rows, int64_t k,
                  uint8_t *strips);

// Rows `ids` as float32 [num_ids, K].
void unpack_rows(const PackedWeights &weights, const int64_t *ids, int64_t num_ids, float *out);

}  // namespace pagemill
