// Working memory that a thread keeps between calls: page faults would cost more than the kernels.
#pragma once

#include <cstdint>

namespace pagemill {

// At least num_floats floats at a 64-byte border, contents undefined, valid until the next call of
// the same function on the same thread.
float *thread_scratch(int64_t num_floats);
float *caller_scratch(int64_t num_floats);  // a second one, for results that cross threads

}  // namespace pagemill
