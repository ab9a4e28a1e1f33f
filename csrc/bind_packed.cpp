// Packed weights on torch tensors in host memory.
#include <nanobind/nanobind.h>

#include <string>

#include "kernels/gguf_decode.hpp"
#include "kernels/ops.hpp"
#include "kernels/packed_weights.hpp"
#include "tensor_arg.hpp"

namespace nb = nanobind;

namespace {

using pagemill::TensorArg;
using Rows = TensorArg<float, 2>;
using Bf16Rows = TensorArg<pagemill::Bf16, 2>;
using ConstRows = TensorArg<const float, 2>;
using ConstByteRows = TensorArg<const uint8_t, 2>;
using ConstBytes = TensorArg<const uint8_t, 1>;
using Bytes = TensorArg<uint8_t, 1>;
using Ids = TensorArg<const int64_t, 1>;

void require(bool condition, const char *words) {
    if (!condition) throw nb::value_error(words);
}

const pagemill::PackedForm &form_of(const char *type) {
    const pagemill::PackedForm *form = pagemill::find_packed_form(type);
    require(form != nullptr, "this GGUF type cannot stay packed");
    return *form;
}

int64_t bytes_of(const pagemill::PackedForm &form, int64_t num_rows, int64_t k) {
    return pagemill::num_strips(num_rows) * form.strip_bytes(k);
}

void require_columns(const char *type, int64_t k) {
    const int64_t values = pagemill::find_gguf_type(type)->block_values;
    require(k > 0 && k % values == 0, "rows must hold whole blocks");
}

nb::object packed_form(const char *type) {
    const pagemill::PackedForm *form = pagemill::find_packed_form(type);
    if (!form) return nb::none();
    const pagemill::GgufType *gguf = pagemill::find_gguf_type(type);
    return nb::make_tuple(gguf->block_values, gguf->block_bytes, form->group_columns);
}

int64_t packed_bytes(const char *type, int64_t num_rows, int64_t num_columns) {
    require_columns(type, num_columns);
    return bytes_of(form_of(type), num_rows, num_columns);
}

void pack_weights(const char *type, ConstByteRows rows, int64_t num_columns, Bytes out) {
    const pagemill::PackedForm &form = form_of(type);
    require_columns(type, num_columns);
    const pagemill::GgufType *gguf = pagemill::find_gguf_type(type);
    const auto num_rows = static_cast<int64_t>(rows.shape(0));
    require(static_cast<int64_t>(rows.shape(1)) ==
                num_columns / gguf->block_values * gguf->block_bytes,
            "rows must be the blocks of the columns");
    require(static_cast<int64_t>(out.size()) == bytes_of(form, num_rows, num_columns),
            "out must have packed_bytes bytes");
    nb::gil_scoped_release release;
    pagemill::pack_weights(form, rows.data(), num_rows, num_columns, out.data());
}

pagemill::PackedWeights weights_of(const char *type, const ConstBytes &packed, int64_t num_rows,
                                   int64_t k) {
    const pagemill::PackedForm &form = form_of(type);
    require_columns(type, k);
    require(num_rows >= 0 &&
                static_cast<int64_t>(packed.size()) >= bytes_of(form, num_rows, k),
            "packed holds fewer rows");
    return {&form, packed.data(), num_rows, k};
}

void packed_rows(const char *type, ConstBytes packed, int64_t num_rows, Ids ids, Rows out) {
    const auto k = static_cast<int64_t>(out.shape(1));
    const pagemill::PackedWeights weights = weights_of(type, packed, num_rows, k);
    const auto count = static_cast<int64_t>(ids.size());
    require(static_cast<int64_t>(out.shape(0)) == count, "out must have one row an id");
    for (int64_t i = 0; i < count; ++i) {
        require(ids.data()[i] >= 0 && ids.data()[i] < num_rows, "a row lies outside");
    }
    nb::gil_scoped_release release;
    pagemill::unpack_rows(weights, ids.data(), count, out.data());
}

template <typename Out, typename Number>
void unpack_packed(const char *type, ConstBytes packed, int64_t num_rows, int64_t first, Out out) {
    const auto k = static_cast<int64_t>(out.shape(1));
    const pagemill::PackedWeights weights = weights_of(type, packed, num_rows, k);
    const int64_t end = first + static_cast<int64_t>(out.shape(0));
    require(first >= 0 && first % pagemill::kStripRows == 0 && end <= num_rows,
            "first must be a multiple of 16, and the rows must be there");
    nb::gil_scoped_release release;
    pagemill::unpack_packed(weights, first, end, reinterpret_cast<Number *>(out.data()));
}

void linear_packed(ConstRows x, const char *type, ConstBytes packed, int64_t num_rows, Rows out,
                   int64_t first_column) {
    const auto k = static_cast<int64_t>(x.shape(1));
    const pagemill::PackedWeights weights = weights_of(type, packed, num_rows, k);
    const auto width = static_cast<int64_t>(out.shape(1));
    require(out.shape(0) == x.shape(0) && first_column >= 0 && first_column + num_rows <= width,
            "out must be [rows of x, columns for all rows of the weights]");
    nb::gil_scoped_release release;
    pagemill::linear_packed(x.data(), static_cast<int64_t>(x.shape(0)), weights,
                            out.data() + first_column, width);
}

}  // namespace

void bind_packed(nb::module_ &m) {
    m.def("packed_form", &packed_form, nb::arg("type"));
    m.def("packed_bytes", &packed_bytes, nb::arg("type"), nb::arg("num_rows"),
          nb::arg("num_columns"));
    m.def("pack_weights", &pack_weights, nb::arg("type"), nb::arg("rows"), nb::arg("num_columns"),
          nb::arg("out"));
    m.def("packed_rows", &packed_rows, nb::arg("type"), nb::arg("packed"), nb::arg("num_rows"),
          nb::arg("ids"), nb::arg("out"));
    m.def("unpack_to_bf16", &unpack_packed<Bf16Rows, uint16_t>, nb::arg("type"), nb::arg("packed"),
          nb::arg("num_rows"), nb::arg("first"), nb::arg("out"));
    m.def("unpack_to_float", &unpack_packed<Rows, float>, nb::arg("type"), nb::arg("packed"),
          nb::arg("num_rows"), nb::arg("first"), nb::arg("out"));
    m.def("linear_packed", &linear_packed, nb::arg("x"), nb::arg("type"), nb::arg("packed"),
          nb::arg("num_rows"), nb::arg("out"), nb::arg("first_column"));
}
