// (parent node, first token) -> child node. Open addressing, removal by shifting back; it grows by
// a quarter with the tree and gives its memory back when the tree is empty. A slot has a hash of
// what it stands for; whether a child is the one that is looked for, its node says.
#pragma once

#include <cstdint>
#include <vector>

namespace pagemill::cache {

using NodeId = uint32_t;
inline constexpr NodeId kNoNode = 0;

class ChildTable {
    struct Slot {
        NodeId child = kNoNode;
        uint32_t tag = 0;
    };
    static constexpr size_t kSmallest = 16;
    std::vector<Slot> slots_ = std::vector<Slot>(kSmallest);
    size_t num_children_ = 0;

    static uint32_t tag_of(NodeId parent, uint32_t token) {
        uint64_t bits = (uint64_t(parent) << 32 | token) * 0x9e3779b97f4a7c15u;
        bits ^= bits >> 29;
        return uint32_t(bits * 0xbf58476d1ce4e5b9u >> 32);
    }
    size_t home(uint32_t tag) const { return size_t(uint64_t(tag) * slots_.size() >> 32); }
    size_t next(size_t slot) const { return slot + 1 == slots_.size() ? 0 : slot + 1; }
    size_t distance(size_t from, size_t to) const {
        return to >= from ? to - from : to + slots_.size() - from;
    }

    void place(const Slot &slot) {
        size_t i = home(slot.tag);
        while (slots_[i].child != kNoNode) i = next(i);
        slots_[i] = slot;
    }
    void grow() {
        std::vector<Slot> old(slots_.size() + slots_.size() / 4);
        old.swap(slots_);
        for (const Slot &slot : old)
            if (slot.child != kNoNode) place(slot);
    }

public:
    size_t num_bytes() const { return slots_.capacity() * sizeof(Slot); }

    void prefetch(NodeId parent, uint32_t token) const {
        __builtin_prefetch(&slots_[home(tag_of(parent, token))]);
    }
    template <typename IsIt>
    NodeId find(NodeId parent, uint32_t token, IsIt is_it) const {
        const uint32_t tag = tag_of(parent, token);
        for (size_t i = home(tag); slots_[i].child != kNoNode; i = next(i))
            if (slots_[i].tag == tag && is_it(slots_[i].child)) return slots_[i].child;
        return kNoNode;
    }
    void insert(NodeId parent, uint32_t token, NodeId child) {
        if (4 * ++num_children_ > 3 * slots_.size()) grow();
        place({child, tag_of(parent, token)});
    }
    // The entry must be there.
    void erase(NodeId parent, uint32_t token, NodeId child) {
        size_t hole = home(tag_of(parent, token));
        while (slots_[hole].child != child) hole = next(hole);
        for (size_t i = next(hole); slots_[i].child != kNoNode; i = next(i)) {
            if (distance(home(slots_[i].tag), i) < distance(hole, i)) continue;
            slots_[hole] = slots_[i];
            hole = i;
        }
        slots_[hole] = {};
        --num_children_;
    }
    void clear() {
        slots_ = std::vector<Slot>(kSmallest);
        num_children_ = 0;
    }
};

}  // namespace pagemill::cache
