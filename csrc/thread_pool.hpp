// The one compute pool of the process: torch's OpenMP runtime where it is found, else own threads.
#pragma once

#include <cstdint>

namespace pagemill {

using ItemFn = void (*)(void *context, int64_t item);

// Calls fn(context, i) once for each i in [0, num_items), on up to num_threads() threads, the
// caller among them; returns when all are done. Items are handed out in ascending order, one at a
// time: put the longest first. fn must not throw. Calls from several threads are safe.
void parallel_run(int64_t num_items, ItemFn fn, void *context);

// The same for any callable fn(int64_t). Not for sources that are compiled per instruction set.
template <typename Fn>
void parallel_for(int64_t num_items, const Fn &fn) {
    auto call = [](void *context, int64_t item) { (*static_cast<const Fn *>(context))(item); };
    parallel_run(num_items, call, const_cast<Fn *>(&fn));
}

int num_threads();
void set_num_threads(int count);  // at least 1

// Looks for an OpenMP runtime that is loaded already; true when it is used from now on.
bool adopt_openmp();
const char *thread_runtime();  // "openmp" or "own"

}  // namespace pagemill
