// Storing K and V of new tokens into their tiles.
#include "kernels/entry_points.hpp"
#include "kernels/kv_lines.hpp"

namespace pagemill::PAGEMILL_ISA {
namespace {

// `lane` is the token's place in its group: K keeps tokens side by side, V channels.
template <typename Lines>
void write_token(const KvView &kv, uint8_t *group, int lane, const float *k, const float *v) {
    for (int pair = 0; pair < kv.head_dim / 2; ++pair) {
        Lines::put(group, pair, lane, k[2 * pair], k[2 * pair + 1]);
    }
    uint8_t *values = group + kv.k_bytes + lane / 2 * Lines::kPairBytes;
    for (int column = 0; column < kv.head_dim / 16; ++column) {
        uint8_t *line = values + column * kValuePairs * Lines::kPairBytes;
        for (int i = 0; i < 16; ++i) Lines::put_one(line, 0, i, lane % 2, v[column * 16 + i]);
    }
}

template <typename Lines>
void write_tokens(const KvWrite &write, int64_t begin, int64_t end) {
    const KvView &kv = write.kv;
    for (int64_t t = begin; t < end; ++t) {
        const int64_t block = write.slots[t] / kv.block_size,
                      place = write.slots[t] % kv.block_size;
        for (int head = 0; head < kv.num_kv_heads; ++head) {
            uint8_t *group = group_at(kv, block, head, place / kGroupTokens);
            const int64_t offset = int64_t{head} * kv.head_dim;
            write_token<Lines>(kv, group, static_cast<int>(place % kGroupTokens),
                               write.k + t * write.k_stride + offset,
                               write.v + t * write.v_stride + offset);
        }
    }
}

}  // namespace

void write_kv(const KvWrite &write, int64_t begin, int64_t end) {
    if (write.kv.format == KvFormat::kBf16) {
        write_tokens<Bf16Lines>(write, begin, end);
    } else {
        write_tokens<Fp32Lines>(write, begin, end);
    }
}

}  // namespace pagemill::PAGEMILL_ISA
