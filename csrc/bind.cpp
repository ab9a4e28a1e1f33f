// The one door between Python and the compiled code: each bind_*.cpp adds the face of one room.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_cache(nb::module_ &m);
void bind_kernels(nb::module_ &m);

NB_MODULE(_native, m) {
    m.doc() = "Compiled parts of pagemill: cache structures and CPU kernels. No torch headers.";
    bind_cache(m);
    bind_kernels(m);
}
