// The other kernels on the compute pool. Shapes are checked by the caller.
#pragma once

#include <vector>

#include "kernels/attention.hpp"
#include "kernels/packed_weights.hpp"

namespace pagemill {

void write_kv(const KvWrite &write, int64_t num_tokens);
void rotate_and_write(const Rotation &rotation, const KvWrite &write, int64_t num_tokens);
void write_raw(const KvWrite &write, const SequenceBatch &batch);
void rotate(const Rotation &rotation, int64_t num_tokens);
void copy_blocks(const std::vector<KvView> &layers, const int64_t *pairs, int64_t num_pairs);
void rms_norm(const float *x, const float *weight, float eps, int64_t n, float *out,
              int64_t num_tokens);
void activate(Activation kind, const float *gate_up, int64_t n, float *out, int64_t num_tokens);
void linear_bf16(const float *x, int64_t x_stride, int64_t num_tokens, const uint16_t *w,
                 int64_t num_rows, int64_t k, float *out);
// out [T, N] of x [T, K] and packed weights; rows of out lie `out_stride` floats apart.
void linear_packed(const float *x, int64_t num_tokens, const PackedWeights &weights, float *out,
                   int64_t out_stride);
// Rows [first, end) as wide numbers; `first` is a multiple of 16.
void unpack_packed(const PackedWeights &weights, int64_t first, int64_t end, uint16_t *out);
void unpack_packed(const PackedWeights &weights, int64_t first, int64_t end, float *out);
void widen_bf16(const uint16_t *in, float *out, int64_t count);

}  // namespace pagemill
