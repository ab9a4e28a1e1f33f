// Declarations of what each *.isa.cpp defines; kernel_table.hpp says what they do.
#pragma once

#include "kernels/kernel_table.hpp"
#include "kernels/linear_packed.hpp"

namespace pagemill::PAGEMILL_ISA {

int64_t attention_scratch_floats(const AttentionCall &call, int64_t num_rows, int64_t num_heads);
int64_t partial_floats(const AttentionCall &call, int64_t num_rows);
void attend(const AttentionCall &call, const RowTile &tile, int64_t first, int64_t end,
            float *partials, float *scratch);
void merge(const AttentionCall &call, const RowTile &tile, float *partials, int64_t count);
void write_kv(const KvWrite &write, int64_t begin, int64_t end);
void write_raw(const KvWrite &write, const RawGroup *groups, int64_t begin, int64_t end);
void rotate(const Rotation &rotation, int64_t begin, int64_t end);
void rms_norm(const float *x, const float *weight, float eps, int64_t n, float *out, int64_t begin,
              int64_t end);
void activate(Activation kind, const float *gate_up, int64_t n, float *out, int64_t begin,
              int64_t end);
#ifdef __AMX_BF16__
constexpr int64_t kLinearStrip = 32, kLinearTokens = 64;
#else
constexpr int64_t kLinearStrip = 24, kLinearTokens = 32;
#endif
int64_t linear_pack_floats(int64_t num_tokens, int64_t k);
void linear_pack(const float *x, int64_t x_stride, int64_t num_tokens, int64_t k, float *packed);
void linear_bf16(const float *packed, int64_t num_tokens, const uint16_t *w, int64_t k, float *out,
                 int64_t out_stride, int64_t begin, int64_t end);
void pack_tokens(const float *x, int64_t x_stride, int64_t num_tokens, int64_t k, bool has_nibbles,
                 TokenBlock *blocks, int64_t begin, int64_t end);
int64_t packed_scratch_floats(int64_t k);
void linear_packed(const PackedCall &call, int64_t begin, int64_t end, float *scratch);
void unpack_to_bf16(const PackedWeights &weights, int64_t begin, int64_t end, uint16_t *out);
void unpack_to_float(const PackedWeights &weights, int64_t begin, int64_t end, float *out);
void widen_bf16(const uint16_t *in, float *out, int64_t count);

}  // namespace pagemill::PAGEMILL_ISA
