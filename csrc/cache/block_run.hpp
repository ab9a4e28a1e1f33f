// The blocks of one node, in eight bytes: none or one stands here, more lie outside.
//
//     words  0, 0        no block
//     words  1, block    one block
//     a pointer (even)   to [size, capacity, block, block, ...]
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <span>
#include <utility>

#include "cache/block_pool.hpp"

namespace pagemill::cache {

class BlockRun {
    static constexpr uint32_t kKept = 16;  // an emptied run keeps room for so many
    uint32_t words_[2] = {0, 0};

    uint32_t *outside() const {
        uint32_t *pointer;
        static_assert(sizeof pointer <= sizeof words_);
        std::memcpy(&pointer, words_, sizeof pointer);
        return pointer;
    }
    bool is_inside() const { return (words_[0] & 1) || (words_[0] == 0 && words_[1] == 0); }
    void point_to(uint32_t *pointer) { std::memcpy(words_, &pointer, sizeof pointer); }
    uint32_t room() const { return is_inside() ? 1 : outside()[1]; }

    void reserve(uint32_t count) {
        if (count <= room()) return;
        const uint32_t old_size = size(), capacity = std::max(count, std::max(4u, 2 * room()));
        auto *made = static_cast<uint32_t *>(std::malloc((capacity + 2ull) * sizeof(uint32_t)));
        if (!made) throw std::bad_alloc();
        std::copy_n(begin(), old_size, made + 2);
        if (!is_inside()) std::free(outside());
        made[0] = old_size;
        made[1] = capacity;
        point_to(made);
    }
    // The blocks are there already, or will be written now.
    void resize(uint32_t count) {
        if (!is_inside()) {
            outside()[0] = count;
            return;
        }
        words_[0] = count;
        if (count == 0) words_[1] = 0;
    }

public:
    BlockRun() = default;
    BlockRun(BlockRun &&other) noexcept { swap(other); }
    BlockRun &operator=(BlockRun &&other) noexcept {
        BlockRun taken(std::move(other));
        swap(taken);
        return *this;
    }
    BlockRun(const BlockRun &) = delete;
    ~BlockRun() {
        if (!is_inside()) std::free(outside());
    }
    void swap(BlockRun &other) {
        std::swap(words_[0], other.words_[0]);
        std::swap(words_[1], other.words_[1]);
    }

    uint32_t size() const { return is_inside() ? words_[0] : outside()[0]; }
    size_t num_bytes_outside() const {
        return is_inside() ? 0 : (outside()[1] + size_t(2)) * sizeof(uint32_t);
    }
    const BlockId *begin() const { return is_inside() ? &words_[1] : outside() + 2; }
    const BlockId *end() const { return begin() + size(); }
    BlockId *begin() { return is_inside() ? &words_[1] : outside() + 2; }
    BlockId *end() { return begin() + size(); }
    BlockId operator[](uint32_t i) const { return begin()[i]; }
    BlockId back() const { return end()[-1]; }

    void push_back(BlockId block) {
        reserve(size() + 1);
        resize(size() + 1);
        end()[-1] = block;
    }
    void pop_back() { resize(size() - 1); }
    void clear() {
        if (!is_inside() && outside()[1] > kKept) BlockRun().swap(*this);
        else resize(0);
    }
    // `count` blocks less at the front; more of them there.
    void erase_front(uint32_t count) {
        std::copy(begin() + count, end(), begin());
        resize(size() - count);
    }
    void insert_front(std::span<const BlockId> blocks) {
        const uint32_t count = uint32_t(blocks.size()), old_size = size();
        if (count == 0) return;
        reserve(old_size + count);
        resize(old_size + count);
        std::copy_backward(begin(), begin() + old_size, end());
        std::copy(blocks.begin(), blocks.end(), begin());
    }
};

}  // namespace pagemill::cache
