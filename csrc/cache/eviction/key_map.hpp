// Key -> a number that is not 0. Open addressing, linear probing, removal by shifting back. Keys
// are parts of hashes, so their low bits are the home slot as they are.
#pragma once

#include <bit>
#include <utility>
#include <vector>

#include "cache/eviction/policy.hpp"

namespace pagemill::cache {

class KeyMap {
    struct Slot {
        Key key;
        uint32_t value;  // 0: free
    };
    std::vector<Slot> slots_;
    size_t size_ = 0;

    size_t mask() const { return slots_.size() - 1; }
    size_t probe(Key key) const {
        size_t i = key & mask();
        while (slots_[i].value && slots_[i].key != key) i = (i + 1) & mask();
        return i;
    }
    void grow() {
        std::vector<Slot> old(slots_.size() * 2);
        old.swap(slots_);
        for (const Slot &slot : old)
            if (slot.value) slots_[probe(slot.key)] = slot;
    }

public:
    explicit KeyMap(size_t expected = 16) : slots_(std::bit_ceil(expected * 2 + 2)) {}

    size_t size() const { return size_; }
    uint32_t find(Key key) const { return slots_[probe(key)].value; }

    void set(Key key, uint32_t value) {
        if (2 * (size_ + 1) > slots_.size()) grow();
        Slot &slot = slots_[probe(key)];
        size_ += slot.value == 0;
        slot = {key, value};
    }

    void erase(Key key) {
        size_t hole = probe(key);
        if (!slots_[hole].value) return;
        for (size_t i = (hole + 1) & mask(); slots_[i].value; i = (i + 1) & mask()) {
            if (((i - slots_[i].key) & mask()) < ((i - hole) & mask())) continue;
            slots_[hole] = slots_[i];
            hole = i;
        }
        slots_[hole] = {0, 0};
        --size_;
    }
};

}  // namespace pagemill::cache
