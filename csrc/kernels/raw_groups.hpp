// Where the tokens of a step lie until their group of 16 is coded (formats that code whole groups).
#pragma once

#include <vector>

#include "kernels/kernel_table.hpp"

namespace pagemill {

struct SequenceBatch;

// A sequence keeps the raw tokens of its unfilled group in its tail slot from step to step. A step
// that touches one group of a sequence works in the tail slot itself; one that touches more has a
// raw group for each in the scratch, the first filled from the tail slot and the last, if it stays
// unfilled, copied back. Sequence i has groups[first[i]] ... groups[first[i + 1] - 1].
struct RawPlan {
    std::vector<RawGroup> groups;
    std::vector<int64_t> first;
};

// Raw groups that the sequences of a batch need in the scratch.
int64_t num_scratch_groups(const SequenceBatch &batch);
RawPlan plan_raw(const SequenceBatch &batch, const KvView &kv);

}  // namespace pagemill
