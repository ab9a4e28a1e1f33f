// GGUF files: strings of the metadata, and tensors to float32.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <string>

#include "kernels/gguf_decode.hpp"

namespace nb = nanobind;

namespace {

// The bytes of any object with the buffer protocol, held for the life of this object.
class Bytes {
  public:
    explicit Bytes(nb::handle object) {
        if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE)) throw nb::python_error();
    }
    ~Bytes() { PyBuffer_Release(&view_); }
    Bytes(const Bytes &) = delete;
    Bytes &operator=(const Bytes &) = delete;
    const uint8_t *data() const { return static_cast<const uint8_t *>(view_.buf); }
    uint64_t size() const { return static_cast<uint64_t>(view_.len); }

  private:
    Py_buffer view_;
};

// `count` strings, each a little-endian uint64 length and its bytes; returns (list, end offset).
nb::tuple gguf_strings(nb::handle buffer, uint64_t offset, uint64_t count) {
    Bytes bytes(buffer);
    if (offset > bytes.size()) throw nb::value_error("the offset lies beyond the end");
    if (count > (bytes.size() - offset) / 8) throw nb::value_error("more strings than bytes");
    nb::list strings;
    for (uint64_t i = 0; i < count; ++i) {
        uint64_t length;
        if (bytes.size() - offset < 8) throw nb::value_error("a string is cut off");
        std::memcpy(&length, bytes.data() + offset, 8);
        offset += 8;
        if (length > bytes.size() - offset) throw nb::value_error("a string is cut off");
        const char *text = reinterpret_cast<const char *>(bytes.data() + offset);
        PyObject *string =
            PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(length), "backslashreplace");
        if (!string) throw nb::python_error();
        strings.append(nb::steal(string));
        offset += length;
    }
    return nb::make_tuple(strings, offset);
}

using FloatRow = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void gguf_decode(const std::string &type_name, nb::handle data, FloatRow out) {
    const pagemill::GgufType *type = pagemill::find_gguf_type(type_name.c_str());
    if (!type) throw nb::value_error(("unknown GGUF type " + type_name).c_str());
    Bytes bytes(data);
    uint64_t num_blocks = bytes.size() / static_cast<uint64_t>(type->block_bytes);
    if (bytes.size() % static_cast<uint64_t>(type->block_bytes) ||
        out.size() != num_blocks * static_cast<uint64_t>(type->block_values)) {
        throw nb::value_error("data and out do not hold the same number of blocks");
    }
    nb::gil_scoped_release release;
    pagemill::gguf_decode(*type, bytes.data(), static_cast<int64_t>(num_blocks), out.data());
}

// (values, bytes) of a block, or None where the type is not known.
nb::object gguf_block(const std::string &type_name) {
    const pagemill::GgufType *type = pagemill::find_gguf_type(type_name.c_str());
    if (!type) return nb::none();
    return nb::make_tuple(type->block_values, type->block_bytes);
}

}  // namespace

void bind_gguf(nb::module_ &m) {
    m.def("gguf_strings", &gguf_strings, nb::arg("buffer"), nb::arg("offset"), nb::arg("count"));
    m.def("gguf_decode", &gguf_decode, nb::arg("type"), nb::arg("data"),
          nb::arg("out").noconvert());
    m.def("gguf_block", &gguf_block, nb::arg("type"));
}
