// What the kernels share across instruction sets: plain structures and the table of entry points.
#pragma once

#include <cstdint>

#include "kernels/kv_format.hpp"

namespace pagemill {

struct TokenBlock;
struct PackedCall;
struct PackedWeights;

constexpr int kStepTokens = 64;   // tokens of one softmax step
constexpr int kStepGroups = kStepTokens / kGroupTokens;
constexpr int kSegmentTokens = 512;  // tokens of one partial softmax; splits fall on its borders
constexpr int kTileRows = 96;        // query rows (tokens x query heads of a KV head) of a tile

// One layer of one layer group: tiles [N], each [K heads][B / 16 token groups][metadata, K, V].
struct KvView {
    uint8_t *base;
    int64_t num_blocks;
    int num_kv_heads, head_dim, block_size;
    KvFormat format;
    GroupBytes bytes;
    int64_t group_bytes, tile_bytes;  // of a head's token group, of all heads and groups of a block
    const float *centers;             // [K heads][D], taken off every key; null: none
};

// A token group of a sequence that is not coded yet, in bf16: [K heads][K, V].
inline int64_t raw_head_bytes(const KvView &kv) {
    return group_bytes_of(KvFormat::kBf16, kv.head_dim).total();
}
inline int64_t raw_bytes(const KvView &kv) { return kv.num_kv_heads * raw_head_bytes(kv); }

// Tokens [first_lane, end_lane) of one raw group, rows [first_row, ...) of k and v. What came
// before in the group lies at `before` if that is another place; with its last token the group is
// coded into its tile. Else it is kept at `kept` for the next step, once all groups are written.
struct RawGroup {
    uint8_t *raw;
    const uint8_t *before;
    uint8_t *kept;
    int64_t block, group_in_block, first_row;
    int first_lane, end_lane;
};

// One attention call over one layer. Rows of q and out lie `*_stride` floats apart.
struct AttentionCall {
    KvView kv;
    const float *q;
    float *out;
    int64_t q_stride, out_stride;
    int num_heads;
    float scale, softcap;  // softcap 0: none
    int64_t window;        // 0: none
    const float *sinks;    // [H]: one logit more in the softmax, without a value; null: none
};

constexpr int kHeadsTogether = 8;  // KV heads that a tile of few rows reads in turn

// Query tokens of one sequence for KV heads [kv_head, kv_head + num_heads). Heads that are read
// together take turns segment by segment: what the processor fetches beyond one head's part of a
// block is the next head's.
struct RowTile {
    const int32_t *table;  // block ids of the sequence
    int64_t first_token;   // row of q
    int64_t num_tokens;
    int64_t position;  // of the first token in its sequence
    int kv_head, num_heads;
    const uint8_t *raw;  // the group of its tokens, not coded yet; null where all is coded
    // Rows of q, where they are of several sequences that share blocks; all stand behind
    // `position`, the last token that is read. null: num_tokens from first_token on.
    const int32_t *token_rows;
};

// The sums of a segment, or of all segments so far: of row r the reference m[r], the sum of weights
// l[r] and the weighted sum of values acc[r][D].
struct Partial {
    float *m, *l, *acc;
};

inline int64_t partial_stride(int64_t num_rows) { return (num_rows + 15) / 16 * 16; }
inline Partial partial_in(float *memory, int64_t num_rows) {
    const int64_t stride = partial_stride(num_rows);
    return {memory, memory + stride, memory + 2 * stride};
}

// A token range of K and V to store. A slot is block id * B + offset. Rows of k and v lie
// `*_stride` floats apart, the heads of a token D floats.
struct KvWrite {
    KvView kv;
    const float *k, *v;
    int64_t k_stride, v_stride;
    const int32_t *slots;
    int first_head = 0, num_heads = 0;  // KV heads that are written; 0: all
};

// Rotation of q and k, in place, before the write. The table holds [cos | sin] rows of `rotary_dim`
// floats. Norm weights [D] are null where heads are not normalized.
struct Rotation {
    float *q, *k;
    int64_t stride;  // floats from token to token
    int num_heads, num_kv_heads, head_dim, rotary_dim;
    const float *table;
    const int32_t *positions;
    const float *q_norm, *k_norm;
    float norm_eps;
};

enum class Activation : int { kSilu, kGeluTanh };

struct KernelTable {
    const char *name;
    int64_t (*attention_scratch_floats)(const AttentionCall &call, int64_t num_rows,
                                        int64_t num_heads);
    int64_t (*partial_floats)(const AttentionCall &call, int64_t num_rows);
    // Segments [first, end) of a tile. partials null: all of its segments, result to `out`; else
    // partials [segments][num_heads].
    void (*attend)(const AttentionCall &call, const RowTile &tile, int64_t first, int64_t end,
                   float *partials, float *scratch);
    void (*merge)(const AttentionCall &call, const RowTile &tile, float *partials, int64_t count);
    void (*write_kv)(const KvWrite &write, int64_t begin, int64_t end);
    void (*write_raw)(const KvWrite &write, const RawGroup *groups, int64_t begin, int64_t end);
    void (*rotate)(const Rotation &rotation, int64_t begin, int64_t end);
    // Rows [begin, end) of [T, n]; gate_up [T, 2n]; output rows are contiguous.
    void (*rms_norm)(const float *x, const float *weight, float eps, int64_t n, float *out,
                     int64_t begin, int64_t end);
    void (*activate)(Activation kind, const float *gate_up, int64_t n, float *out, int64_t begin,
                     int64_t end);
    // out = x [T, K] w [N, K]^T for rows [begin, end) of w; best in whole strips of rows, and up to
    // so many tokens.
    int64_t linear_strip, linear_tokens;
    int64_t (*linear_pack_floats)(int64_t num_tokens, int64_t k);
    void (*linear_pack)(const float *x, int64_t x_stride, int64_t num_tokens, int64_t k,
                        float *packed);
    void (*linear_bf16)(const float *packed, int64_t num_tokens, const uint16_t *w, int64_t k,
                        float *out, int64_t out_stride, int64_t begin, int64_t end);
    // x to integers, tiles [begin, end) of 16 tokens; then strips [begin, end) of packed weights.
    void (*pack_tokens)(const float *x, int64_t x_stride, int64_t num_tokens, int64_t k,
                        bool has_nibbles, TokenBlock *blocks, int64_t begin, int64_t end);
    int64_t (*packed_scratch_floats)(int64_t k);
    void (*linear_packed)(const PackedCall &call, int64_t begin, int64_t end, float *scratch);
    // Strips [begin, end) as rows of wide numbers, `out` at the first.
    void (*unpack_to_bf16)(const PackedWeights &weights, int64_t begin, int64_t end,
                           uint16_t *out);
    void (*unpack_to_float)(const PackedWeights &weights, int64_t begin, int64_t end, float *out);
    void (*widen_bf16)(const uint16_t *in, float *out, int64_t count);
};

// The best table for this processor, or the one chosen by set_isa.
const KernelTable &kernels();
// portable, avx2, avx512, amx, or auto; false where it cannot run here
bool set_isa(const char *name);
const char *isa_name();
const char *available_isa(int index);  // those that can run here, best first; nullptr behind them

}  // namespace pagemill
