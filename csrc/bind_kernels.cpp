// The face of the kernels room: threads here, the rest by topic in bind_*.cpp.
#include <nanobind/nanobind.h>

#include "thread_pool.hpp"

namespace nb = nanobind;

void bind_gguf(nb::module_ &m);
void bind_kv(nb::module_ &m);
void bind_ops(nb::module_ &m);
void bind_packed(nb::module_ &m);

void bind_kernels(nb::module_ &m) {
    m.def("num_threads", &pagemill::num_threads);
    m.def("set_num_threads", &pagemill::set_num_threads, nb::arg("count"));
    m.def("adopt_openmp", &pagemill::adopt_openmp);
    m.def("thread_runtime", &pagemill::thread_runtime);
    bind_gguf(m);
    bind_kv(m);
    bind_ops(m);
    bind_packed(m);
}
