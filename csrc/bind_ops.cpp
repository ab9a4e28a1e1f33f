// Norms, activations and small products on torch or numpy arrays in host memory.
#include <nanobind/nanobind.h>

#include "kernels/ops.hpp"
#include "tensor_arg.hpp"

namespace nb = nanobind;

namespace {

using pagemill::TensorArg;
using Rows = TensorArg<float, 2>;
using ConstRows = TensorArg<const float, 2>;
using ConstFloats = TensorArg<const float, 1>;
using Bf16Rows = TensorArg<const pagemill::Bf16, 2>;

void require(bool condition, const char *words) {
    if (!condition) throw nb::value_error(words);
}

const uint16_t *bits_of(const Bf16Rows &values) {
    return reinterpret_cast<const uint16_t *>(values.data());
}

void rms_norm(ConstRows x, ConstFloats weight, float eps, Rows out) {
    require(weight.size() == x.shape(1), "the norm needs one weight a column");
    require(out.shape(0) == x.shape(0) && out.shape(1) == x.shape(1),
            "out must have the shape of x");
    nb::gil_scoped_release release;
    pagemill::rms_norm(x.data(), weight.data(), eps, static_cast<int64_t>(x.shape(1)), out.data(),
                       static_cast<int64_t>(x.shape(0)));
}

template <pagemill::Activation kKind>
void activate(ConstRows gate_up, Rows out) {
    require(gate_up.shape(0) == out.shape(0) && gate_up.shape(1) == 2 * out.shape(1),
            "gate_up must be [T, 2 N] and out [T, N]");
    nb::gil_scoped_release release;
    pagemill::activate(kKind, gate_up.data(), static_cast<int64_t>(out.shape(1)), out.data(),
                       static_cast<int64_t>(out.shape(0)));
}

void linear_bf16(ConstRows x, Bf16Rows weight, Rows out) {
    require(x.shape(1) == weight.shape(1), "x and weight differ in columns");
    require(out.shape(0) == x.shape(0) && out.shape(1) == weight.shape(0),
            "out must be [rows of x, rows of weight]");
    const int64_t k = static_cast<int64_t>(x.shape(1));
    const uint16_t *w = bits_of(weight);
    nb::gil_scoped_release release;
    pagemill::linear_bf16(x.data(), k, static_cast<int64_t>(x.shape(0)), w,
                          static_cast<int64_t>(weight.shape(0)), k, out.data());
}

void widen_bf16(Bf16Rows in, Rows out) {
    require(in.shape(0) == out.shape(0) && in.shape(1) == out.shape(1), "shapes differ");
    const uint16_t *values = bits_of(in);
    nb::gil_scoped_release release;
    pagemill::widen_bf16(values, out.data(), static_cast<int64_t>(in.size()));
}

nb::list available_isas() {
    nb::list names;
    for (int i = 0; const char *name = pagemill::available_isa(i); ++i) names.append(name);
    return names;
}

}  // namespace

void bind_ops(nb::module_ &m) {
    m.def("rms_norm", &rms_norm, nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("out"));
    m.def("silu_mul", &activate<pagemill::Activation::kSilu>, nb::arg("gate_up"), nb::arg("out"));
    m.def("gelu_tanh_mul", &activate<pagemill::Activation::kGeluTanh>, nb::arg("gate_up"),
          nb::arg("out"));
    m.def("linear_bf16", &linear_bf16, nb::arg("x"), nb::arg("weight"), nb::arg("out"));
    m.def("linear_tokens", [] { return pagemill::kernels().linear_tokens; });
    m.def("widen_bf16", &widen_bf16, nb::arg("values"), nb::arg("out"));
    m.def("set_isa", &pagemill::set_isa, nb::arg("name"));
    m.def("isa_name", &pagemill::isa_name);
    m.def("available_isas", &available_isas);
}
