#include "kernels/raw_groups.hpp"

#include <algorithm>

#include "kernels/attention.hpp"

namespace pagemill {
namespace {

int64_t num_touched(const SequenceBatch &batch, int64_t i) {
    const int64_t start = batch.context_start[i];
    const int64_t end = start + batch.query_start[i + 1] - batch.query_start[i];
    if (end == start) return 0;
    return (end - 1) / kGroupTokens - start / kGroupTokens + 1;
}

}  // namespace

int64_t num_scratch_groups(const SequenceBatch &batch) {
    int64_t total = 0;
    for (int64_t i = 0; i < batch.num_sequences; ++i) {
        const int64_t count = num_touched(batch, i);
        if (count > 1) total += count;
    }
    return total;
}

RawPlan plan_raw(const SequenceBatch &batch, const KvView &kv) {
    RawPlan plan;
    const int64_t size = raw_bytes(kv), in_block = kv.block_size / kGroupTokens;
    uint8_t *scratch = batch.raw.scratch;
    for (int64_t i = 0; i < batch.num_sequences; ++i) {
        plan.first.push_back(static_cast<int64_t>(plan.groups.size()));
        const int64_t count = num_touched(batch, i), start = batch.context_start[i];
        const int64_t row = batch.query_start[i], end = start + batch.query_start[i + 1] - row;
        uint8_t *tail = count ? batch.raw.tails + batch.raw.tail_slots[i] * size : nullptr;
        for (int64_t j = 0; j < count; ++j) {
            const int64_t group = start / kGroupTokens + j, first = group * kGroupTokens;
            const int64_t begin = std::max(start, first);
            RawGroup raw = {};
            raw.raw = count > 1 ? scratch + j * size : tail;
            raw.before = begin > first ? tail : nullptr;
            raw.kept = tail;
            raw.block = batch.block_ids[batch.indptr[i] + group / in_block];
            raw.group_in_block = group % in_block;
            raw.first_row = row + begin - start;
            raw.first_lane = static_cast<int>(begin - first);
            raw.end_lane = static_cast<int>(std::min<int64_t>(end - first, kGroupTokens));
            plan.groups.push_back(raw);
        }
        if (count > 1) scratch += count * size;
    }
    plan.first.push_back(static_cast<int64_t>(plan.groups.size()));
    return plan;
}

}  // namespace pagemill
