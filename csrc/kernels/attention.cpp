#include "kernels/attention.hpp"

#include <cstring>

#include "kernels/attention_plan.hpp"
#include "kernels/scratch.hpp"
#include "thread_pool.hpp"

namespace pagemill {
namespace {

void finish_item(const AttentionCall &call, const Work &work) {
    if (work.num_left->fetch_sub(1) == 1) {
        kernels().merge(call, work.tile, work.partials, work.num_segments());
    }
}

void run_work(const AttentionCall &call, const Work &work, const Item &item, float *scratch) {
    if (!work.partials) {
        return kernels().attend(call, work.tile, item.first_segment, item.end_segment, nullptr,
                                scratch);
    }
    const int64_t stride =
        work.tile.num_heads * kernels().partial_floats(call, rows_of(call, work.tile));
    float *partials = work.partials + (item.first_segment - work.first_segment) * stride;
    kernels().attend(call, work.tile, item.first_segment, item.end_segment, partials, scratch);
    finish_item(call, work);
}

// The partials of rows that were read together, each to the work that it belongs to.
void run_shared(const AttentionCall &call, const AttentionPlan &plan, const Item &item,
                float *scratch) {
    const SharedWork &shared = plan.shared[item.index];
    const int64_t num_rows = rows_of(call, shared.tile), dim = call.kv.head_dim;
    const int64_t each = num_rows / shared.tile.num_tokens;
    const int64_t stride = kernels().partial_floats(call, num_rows);
    float *rest = scratch + (item.end_segment - item.first_segment) * stride;
    kernels().attend(call, shared.tile, item.first_segment, item.end_segment, scratch, rest);
    for (size_t i = 0; i < shared.members.size(); ++i) {
        const Work &work = plan.works[shared.members[i]];
        const int64_t own_stride = kernels().partial_floats(call, each);
        for (int64_t s = item.first_segment; s < item.end_segment; ++s) {
            const Partial from = partial_in(scratch + (s - item.first_segment) * stride, num_rows);
            const int64_t place = (s - work.first_segment) * work.tile.num_heads +
                                  shared.tile.kv_head - work.tile.kv_head;
            const Partial to = partial_in(work.partials + place * own_stride, each);
            const int64_t row = static_cast<int64_t>(i) * each;
            const auto size = static_cast<size_t>(each) * sizeof(float);
            std::memcpy(to.m, from.m + row, size);
            std::memcpy(to.l, from.l + row, size);
            std::memcpy(to.acc, from.acc + row * dim, size * static_cast<size_t>(dim));
        }
        finish_item(call, work);
    }
}

const char *check_shared(const SequenceBatch &batch) {
    const SharedRuns &shared = batch.shared;
    for (int64_t run = 0; run < shared.num_runs; ++run) {
        const int64_t from = shared.runs[2 * run], end = from + shared.runs[2 * run + 1];
        const int32_t *first = nullptr;
        if (from < 0 || end < from) return "a shared run is no range";
        for (int64_t i = shared.indptr[run]; i < shared.indptr[run + 1]; ++i) {
            const int32_t member = shared.members[i];
            if (member < 0 || member >= batch.num_sequences) {
                return "a shared run names a sequence that is not there";
            }
            const int64_t blocks = batch.indptr[member + 1] - int64_t{batch.indptr[member]};
            if (end > blocks) return "a shared run is longer than a block table";
            const int32_t *table = batch.block_ids + batch.indptr[member];
            if (!first) first = table;
            if (std::memcmp(table + from, first + from, size_t(end - from) * sizeof(int32_t))) {
                return "sequences of a shared run have other blocks";
            }
        }
    }
    return nullptr;
}

}  // namespace

const char *check_batch(const SequenceBatch &batch, const KvView &kv, int64_t num_tokens,
                        int64_t num_block_ids) {
    const int64_t n = batch.num_sequences;
    if (batch.query_start[0] != 0 || batch.query_start[n] != num_tokens) {
        return "query_start must run from 0 to the number of tokens";
    }
    if (batch.indptr[0] < 0 || batch.indptr[n] > num_block_ids) {
        return "indptr points outside of block_ids";
    }
    for (int64_t i = 0; i < n; ++i) {
        const int64_t count = batch.query_start[i + 1] - int64_t{batch.query_start[i]};
        const int64_t blocks = batch.indptr[i + 1] - int64_t{batch.indptr[i]};
        if (count < 0 || blocks < 0) return "query_start and indptr must not descend";
        if (batch.context_start[i] < 0) return "context_start is negative";
        if (count && (batch.context_start[i] + count - 1) / kv.block_size >= blocks) {
            return "a block table is shorter than its sequence";
        }
    }
    for (int64_t i = batch.indptr[0]; i < batch.indptr[n]; ++i) {
        if (batch.block_ids[i] < 0 || batch.block_ids[i] >= kv.num_blocks) {
            return "a block id lies outside of the pool";
        }
    }
    return check_shared(batch);
}

void paged_attention(const AttentionCall &call, const SequenceBatch &batch) {
    const AttentionPlan plan = plan_attention(call, batch);
    parallel_for(static_cast<int64_t>(plan.items.size()), [&](int64_t i) {
        const Item &item = plan.items[static_cast<size_t>(i)];
        float *scratch = thread_scratch(plan.scratch_floats);
        if (item.is_shared) return run_shared(call, plan, item, scratch);
        run_work(call, plan.works[item.index], item, scratch);
    });
}

}  // namespace pagemill
