// One attention call over a mix of sequences: cut into row tiles, shared among threads.
#pragma once

#include "kernels/kernel_table.hpp"

namespace pagemill {

// For formats that code whole groups: the tail slot of each sequence, the tail slots of the layer,
// and memory for num_scratch_groups(batch) more.
struct RawMemory {
    const int32_t *tail_slots;
    uint8_t *tails, *scratch;
};

// Runs of blocks that several sequences have at the same places of their tables, so that one
// reading serves all: run r is blocks [runs[2 r], runs[2 r] + runs[2 r + 1]) of the sequences
// members[indptr[r]], ..., members[indptr[r + 1] - 1].
struct SharedRuns {
    int64_t num_runs;
    const int32_t *runs, *members, *indptr;
};

// Sequences of a call. Tokens [query_start[i], query_start[i + 1]) of q belong to sequence i and
// stand at context_start[i] and after; its block ids are [indptr[i], indptr[i + 1]).
struct SequenceBatch {
    int64_t num_sequences;
    const int32_t *query_start, *context_start, *block_ids, *indptr;
    RawMemory raw;
    SharedRuns shared;
};

// Words on what is wrong with the batch, or nullptr. Nothing outside the arena can be read after
// it.
const char *check_batch(const SequenceBatch &batch, const KvView &kv, int64_t num_tokens,
                        int64_t num_block_ids);

void paged_attention(const AttentionCall &call, const SequenceBatch &batch);

}  // namespace pagemill
