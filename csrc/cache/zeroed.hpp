// A fixed array of zeros that costs nothing until it is touched: calloc hands out fresh pages.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>

namespace pagemill::cache {

template <typename T>
class Zeroed {
    static_assert(std::is_trivial_v<T>);
    struct Free {
        void operator()(T *data) const { std::free(data); }
    };
    std::unique_ptr<T[], Free> data_;
    size_t size_ = 0;

public:
    Zeroed() = default;
    explicit Zeroed(size_t size)
        : data_(static_cast<T *>(std::calloc(size ? size : 1, sizeof(T)))), size_(size) {
        if (!data_) throw std::bad_alloc();
    }
    T &operator[](size_t i) { return data_[i]; }
    const T &operator[](size_t i) const { return data_[i]; }
    T *data() { return data_.get(); }
    const T *data() const { return data_.get(); }
    size_t size() const { return size_; }
    size_t num_bytes() const { return size_ * sizeof(T); }
};

}  // namespace pagemill::cache
