// Decoding of GGUF tensor types to float32. Source of the formats: ggml's block structures.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pagemill {

// How a GGUF tensor type lies in the file: blocks of `block_values` values, `block_bytes` each.
struct GgufType {
    const char *name;
    int64_t block_values;
    int64_t block_bytes;
    void (*decode)(const uint8_t *blocks, int64_t num_blocks, float *out);
};

const GgufType *find_gguf_type(const char *name);  // nullptr where there is no such type

// Decodes whole blocks on the compute pool.
void gguf_decode(const GgufType &type, const uint8_t *data, int64_t num_blocks, float *out);

}  // namespace pagemill
