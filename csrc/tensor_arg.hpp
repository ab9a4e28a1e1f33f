// Array arguments of bound functions: torch tensors and numpy arrays in host memory.
//
// torch's __dlpack__ costs several microseconds a tensor. Tensor types that offer the C exchange
// interface of DLPack 1.2 (torch from 2.10 on) are read through it in a fraction of one, numpy
// arrays through the buffer protocol; all else goes through nanobind's ndarray. Nothing is
// converted or copied: a wrong dtype, device, number of dimensions or order of memory is a
// TypeError.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <type_traits>

namespace pagemill {

struct Bf16 {
    uint16_t bits;
};

// kAnyStrides: rows may lie apart, the caller looks at stride().
template <typename T, int kDims, bool kAnyStrides = false>
struct TensorArg {
    T *data_ = nullptr;
    int64_t shape_[kDims] = {}, strides_[kDims] = {};

    T *data() const { return data_; }
    size_t shape(int i) const { return static_cast<size_t>(shape_[i]); }
    int64_t stride(int i) const { return strides_[i]; }
    size_t size() const {
        size_t count = 1;
        for (int64_t n : shape_) count *= static_cast<size_t>(n);
        return count;
    }
};

namespace tensor_arg {

namespace nb = nanobind;

// DLPackExchangeAPI of DLPack 1.2 and 1.3; entries in between are not used here.
struct ExchangeApi {
    uint32_t major, minor;
    void *previous;
    void *allocate, *managed_from_object, *object_from_managed;
    int (*view)(void *object, nb::dlpack::dltensor *out);
};

// The interface that the type of an object offers, or null.
inline const ExchangeApi *exchange_api(nb::handle object) {
    static PyObject *name = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
    PyObject *capsule = PyObject_GetAttr(reinterpret_cast<PyObject *>(Py_TYPE(object.ptr())), name);
    const ExchangeApi *api = nullptr;
    if (capsule && PyCapsule_IsValid(capsule, "dlpack_exchange_api")) {
        void *found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
        api = static_cast<const ExchangeApi *>(found);
    }
    PyErr_Clear();
    Py_XDECREF(capsule);  // the type keeps it
    return api && api->major == 1 ? api : nullptr;
}

template <typename T>
constexpr nb::dlpack::dtype dtype_of() {
    using Plain = std::remove_const_t<T>;
    if constexpr (std::is_same_v<Plain, Bf16>) {
        return {static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat), 16, 1};
    } else {
        return nb::dtype<Plain>();
    }
}

// Whether a format of the buffer protocol means T.
template <typename T>
bool is_format_of(const char *format, int64_t item_bytes) {
    const char kind = format ? format[0] : 'B';
    if (item_bytes != static_cast<int64_t>(sizeof(T)) || (format && format[1])) return false;
    if constexpr (std::is_floating_point_v<T>) return kind == 'f' || kind == 'd';
    return std::is_integral_v<T> && (kind == 'i' || kind == 'l' || kind == 'q');
}

template <typename Tensor, typename T, int kDims, bool kAnyStrides>
bool take_view(Tensor &to, void *data, const nb::dlpack::dtype &dtype, int ndim,
               const int64_t *shape, const int64_t *strides) {
    if (dtype != dtype_of<T>() || ndim != kDims) return false;
    to.data_ = static_cast<T *>(data);
    int64_t packed = 1;
    for (int i = kDims - 1; i >= 0; --i) {
        to.shape_[i] = shape[i];
        to.strides_[i] = strides ? strides[i] : packed;
        if (!kAnyStrides && shape[i] > 1 && to.strides_[i] != packed) return false;
        packed *= shape[i];
    }
    return true;
}

}  // namespace tensor_arg
}  // namespace pagemill

namespace nanobind::detail {

template <typename T, int kDims, bool kAnyStrides>
struct type_caster<pagemill::TensorArg<T, kDims, kAnyStrides>> {
    using Arg = pagemill::TensorArg<T, kDims, kAnyStrides>;
    NB_TYPE_CASTER(Arg, const_name("Tensor"))

    bool from_python(handle source, uint32_t, cleanup_list *) noexcept {
        namespace ta = pagemill::tensor_arg;
        if (const ta::ExchangeApi *api = ta::exchange_api(source)) {
            dlpack::dltensor view;
            if (api->view(source.ptr(), &view)) {
                PyErr_Clear();
                return false;
            }
            char *data = static_cast<char *>(view.data) + view.byte_offset;
            return view.device.device_type == device::cpu::value &&
                   ta::take_view<Arg, T, kDims, kAnyStrides>(value, data, view.dtype, view.ndim,
                                                             view.shape, view.strides);
        }
        return PyObject_CheckBuffer(source.ptr()) ? from_buffer(source) : from_array(source);
    }

    bool from_buffer(handle source) noexcept {
        namespace ta = pagemill::tensor_arg;
        using Plain = std::remove_const_t<T>;
        Py_buffer view;
        const int write = std::is_const_v<T> ? 0 : PyBUF_WRITABLE;
        if (PyObject_GetBuffer(source.ptr(), &view, PyBUF_STRIDES | PyBUF_FORMAT | write)) {
            PyErr_Clear();
            return false;
        }
        int64_t strides[kDims];
        bool fits = view.ndim == kDims && ta::is_format_of<Plain>(view.format, view.itemsize);
        for (int i = 0; fits && i < kDims; ++i) strides[i] = view.strides[i] / view.itemsize;
        fits = fits && ta::take_view<Arg, T, kDims, kAnyStrides>(value, view.buf, ta::dtype_of<T>(),
                                                                 kDims, view.shape, strides);
        PyBuffer_Release(&view);  // the caller holds the array until the function returns
        return fits;
    }

    bool from_array(handle source) noexcept {
        constexpr bool kIsBf16 = std::is_same_v<std::remove_const_t<T>, pagemill::Bf16>;
        using Any = ndarray<ro, device::cpu>;
        using Typed = ndarray<std::conditional_t<kIsBf16, const uint8_t, T>, device::cpu>;
        make_caster<std::conditional_t<kIsBf16, Any, Typed>> caster;
        if (!caster.from_python(source, 0, nullptr)) return false;
        auto &array = caster.value;
        int64_t shape[kDims], strides[kDims];
        if (array.ndim() != kDims) return false;
        for (int i = 0; i < kDims; ++i) {
            shape[i] = static_cast<int64_t>(array.shape(static_cast<size_t>(i)));
            strides[i] = array.stride(static_cast<size_t>(i));
        }
        auto *data = const_cast<void *>(static_cast<const void *>(array.data()));
        return pagemill::tensor_arg::take_view<Arg, T, kDims, kAnyStrides>(
            value, data, array.dtype(), kDims, shape, strides);
    }
};

}  // namespace nanobind::detail
