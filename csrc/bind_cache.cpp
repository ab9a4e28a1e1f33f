#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_cache(nb::module_ &) {}
