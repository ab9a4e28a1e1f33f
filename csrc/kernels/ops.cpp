#include "kernels/ops.hpp"

#include <algorithm>
#include <cstring>

#include "kernels/linear_packed.hpp"
#include "kernels/raw_groups.hpp"
#include "kernels/scratch.hpp"
#include "thread_pool.hpp"

namespace pagemill {
namespace {

// fn(begin, end) over pieces of [0, count) of about `piece` each: what is below is not worth a
// thread.
template <typename Fn>
void in_pieces(int64_t count, int64_t piece, const Fn &fn) {
    piece = std::max<int64_t>(1, piece);
    parallel_for((count + piece - 1) / piece,
                 [&](int64_t i) { fn(i * piece, std::min(count, (i + 1) * piece)); });
}

constexpr int64_t kPieceFloats = 16384;

// Two tokens of a group share bytes where V has 4 bits: then threads share the heads, not tokens.
// (`width` floats a token: more than one piece.)
bool shares_heads(const KvWrite &write, int64_t num_tokens, int64_t width) {
    return write.kv.format == KvFormat::kK8v4 && num_tokens * width > kPieceFloats;
}

void write_heads(const KvWrite &write, int64_t num_tokens) {
    parallel_for(write.kv.num_kv_heads, [&](int64_t head) {
        KvWrite part = write;
        part.first_head = static_cast<int>(head);
        part.num_heads = 1;
        kernels().write_kv(part, 0, num_tokens);
    });
}

}  // namespace

void write_kv(const KvWrite &write, int64_t num_tokens) {
    const int64_t width = int64_t{write.kv.num_kv_heads} * write.kv.head_dim;
    if (shares_heads(write, num_tokens, width)) return write_heads(write, num_tokens);
    in_pieces(num_tokens, kPieceFloats / width,
              [&](int64_t begin, int64_t end) { kernels().write_kv(write, begin, end); });
}

void write_raw(const KvWrite &write, const SequenceBatch &batch) {
    const RawPlan plan = plan_raw(batch, write.kv);
    const int64_t width = int64_t{write.kv.num_kv_heads} * write.kv.head_dim * kGroupTokens;
    const auto count = static_cast<int64_t>(plan.groups.size());
    in_pieces(count, kPieceFloats / width, [&](int64_t begin, int64_t end) {
        kernels().write_raw(write, plan.groups.data(), begin, end);
    });
    for (const RawGroup &group : plan.groups) {  // a tail slot was read by another group before
        if (group.end_lane < kGroupTokens && group.kept != group.raw) {
            std::memcpy(group.kept, group.raw, static_cast<size_t>(raw_bytes(write.kv)));
        }
    }
}

void rotate(const Rotation &rotation, int64_t num_tokens) {
    const int64_t width =
        int64_t{rotation.num_heads + rotation.num_kv_heads} * rotation.head_dim;
    in_pieces(num_tokens, kPieceFloats / width,
              [&](int64_t begin, int64_t end) { kernels().rotate(rotation, begin, end); });
}

void rotate_and_write(const Rotation &rotation, const KvWrite &write, int64_t num_tokens) {
    const int64_t width =
        int64_t{rotation.num_heads + 2 * rotation.num_kv_heads} * rotation.head_dim;
    if (shares_heads(write, num_tokens, width)) {
        rotate(rotation, num_tokens);
        return write_heads(write, num_tokens);
    }
    in_pieces(num_tokens, kPieceFloats / width, [&](int64_t begin, int64_t end) {
        kernels().rotate(rotation, begin, end);
        kernels().write_kv(write, begin, end);
    });
}

void copy_blocks(const std::vector<KvView> &layers, const int64_t *pairs, int64_t num_pairs) {
    parallel_for(static_cast<int64_t>(layers.size()), [&](int64_t layer) {
        const KvView &kv = layers[static_cast<size_t>(layer)];
        for (int64_t i = 0; i < num_pairs; ++i) {
            std::memmove(kv.base + pairs[2 * i + 1] * kv.tile_bytes,
                         kv.base + pairs[2 * i] * kv.tile_bytes,
                         static_cast<size_t>(kv.tile_bytes));
        }
    });
}

void rms_norm(const float *x, const float *weight, float eps, int64_t n, float *out,
              int64_t num_tokens) {
    in_pieces(num_tokens, kPieceFloats / std::max<int64_t>(1, n), [&](int64_t begin, int64_t end) {
        kernels().rms_norm(x, weight, eps, n, out, begin, end);
    });
}

void activate(Activation kind, const float *gate_up, int64_t n, float *out, int64_t num_tokens) {
    in_pieces(num_tokens, kPieceFloats / std::max<int64_t>(1, n), [&](int64_t begin, int64_t end) {
        kernels().activate(kind, gate_up, n, out, begin, end);
    });
}

void linear_bf16(const float *x, int64_t x_stride, int64_t num_tokens, const uint16_t *w,
                 int64_t num_rows, int64_t k, float *out) {
    float *packed = caller_scratch(kernels().linear_pack_floats(num_tokens, k));
    kernels().linear_pack(x, x_stride, num_tokens, k, packed);
    const int64_t share = (num_rows + 4 * num_threads() - 1) / (4 * num_threads());
    const int64_t strip = kernels().linear_strip;
    const int64_t piece = (std::clamp<int64_t>(share, strip, 1536) + strip - 1) / strip * strip;
    in_pieces(num_rows, piece, [&](int64_t begin, int64_t end) {
        kernels().linear_bf16(packed, num_tokens, w, k, out, num_rows, begin, end);
    });
}

namespace {

constexpr int64_t kCompanyTokens = 64;  // that pass over a strip while it lies in the first cache

void linear_packed_some(const float *x, int64_t num_tokens, const PackedWeights &weights,
                        float *out, int64_t out_stride) {
    const int64_t k = weights.k, num_blocks = num_token_blocks(num_tokens, k);
    const auto floats = num_blocks * static_cast<int64_t>(sizeof(TokenBlock) / sizeof(float));
    auto *blocks = reinterpret_cast<TokenBlock *>(caller_scratch(floats));
    const int64_t num_tiles = (num_tokens + kTokensOfBlock - 1) / kTokensOfBlock;
    in_pieces(num_tiles, 2, [&](int64_t begin, int64_t end) {
        kernels().pack_tokens(x, k, num_tokens, k, weights.form->has_nibbles, blocks, begin, end);
    });
    const PackedCall call{weights, blocks, num_tokens, out, out_stride};
    const int64_t count = num_strips(weights.num_rows), pieces = 4 * num_threads();
    in_pieces(count, std::clamp<int64_t>((count + pieces - 1) / pieces, 1, 64),
              [&](int64_t begin, int64_t end) {
                  float *scratch = thread_scratch(kernels().packed_scratch_floats(k));
                  kernels().linear_packed(call, begin, end, scratch);
              });
}

}  // namespace

void linear_packed(const float *x, int64_t num_tokens, const PackedWeights &weights, float *out,
                   int64_t out_stride) {
    for (int64_t t = 0; t < num_tokens; t += kCompanyTokens) {
        linear_packed_some(x + t * weights.k, std::min(kCompanyTokens, num_tokens - t), weights,
                           out + t * out_stride, out_stride);
    }
}

namespace {

template <class Out, class Fn>
void unpack_some(PackedWeights weights, int64_t first, int64_t end, Out *out, const Fn &unpack) {
    weights.num_rows = end;
    const int64_t strip = first / kStripRows, count = num_strips(end) - strip;
    in_pieces(count, 8, [&](int64_t from, int64_t to) {
        unpack(weights, strip + from, strip + to, out + from * kStripRows * weights.k);
    });
}

}  // namespace

void unpack_packed(const PackedWeights &weights, int64_t first, int64_t end, uint16_t *out) {
    unpack_some(weights, first, end, out, kernels().unpack_to_bf16);
}

void unpack_packed(const PackedWeights &weights, int64_t first, int64_t end, float *out) {
    unpack_some(weights, first, end, out, kernels().unpack_to_float);
}

void widen_bf16(const uint16_t *in, float *out, int64_t count) {
    in_pieces(count, 1 << 16, [&](int64_t begin, int64_t end) {
        kernels().widen_bf16(in + begin, out + begin, end - begin);
    });
}

}  // namespace pagemill
