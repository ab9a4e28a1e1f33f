// (parent node, first token) -> child node. Open addressing, removal by shifting back; it grows
// with the tree and gives its memory back when the tree is empty.
#pragma once

#include <cstdint>
#include <vector>

namespace pagemill::cache {

using NodeId = uint32_t;
inline constexpr NodeId kNoNode = 0;

class ChildTable {
    struct Slot {
        NodeId child = kNoNode, parent = kNoNode;
        uint32_t token = 0;
    };
    static constexpr size_t kSmallest = 16;
    std::vector<Slot> slots_ = std::vector<Slot>(kSmallest);
    size_t mask_ = kSmallest - 1;
    uint32_t num_children_ = 0;

    size_t home(NodeId parent, uint32_t token) const {
        uint64_t bits = (uint64_t(parent) << 32 | token) * 0x9e3779b97f4a7c15u;
        bits ^= bits >> 29;
        return size_t(bits * 0xbf58476d1ce4e5b9u >> 24) & mask_;
    }
    size_t next(size_t slot) const { return (slot + 1) & mask_; }

    void place(const Slot &slot) {
        size_t i = home(slot.parent, slot.token);
        while (slots_[i].child != kNoNode) i = next(i);
        slots_[i] = slot;
    }
    void grow() {
        std::vector<Slot> old(slots_.size() * 2);
        old.swap(slots_);
        mask_ = slots_.size() - 1;
        for (const Slot &slot : old)
            if (slot.child != kNoNode) place(slot);
    }

public:
    size_t num_bytes() const { return slots_.capacity() * sizeof(Slot); }

    void prefetch(NodeId parent, uint32_t token) const {
        __builtin_prefetch(&slots_[home(parent, token)]);
    }
    NodeId find(NodeId parent, uint32_t token) const {
        for (size_t i = home(parent, token); slots_[i].child != kNoNode; i = next(i))
            if (slots_[i].parent == parent && slots_[i].token == token) return slots_[i].child;
        return kNoNode;
    }
    void insert(NodeId parent, uint32_t token, NodeId child) {
        if (2 * ++num_children_ > slots_.size()) grow();
        place({child, parent, token});
    }
    // The entry must be there.
    void erase(NodeId parent, uint32_t token) {
        size_t hole = home(parent, token);
        while (slots_[hole].parent != parent || slots_[hole].token != token) hole = next(hole);
        for (size_t i = next(hole); slots_[i].child != kNoNode; i = next(i)) {
            size_t from_home = (i - home(slots_[i].parent, slots_[i].token)) & mask_;
            if (from_home < ((i - hole) & mask_)) continue;
            slots_[hole] = slots_[i];
            hole = i;
        }
        slots_[hole] = {};
        --num_children_;
    }
    void clear() {
        slots_ = std::vector<Slot>(kSmallest);
        mask_ = kSmallest - 1;
        num_children_ = 0;
    }
};

}  // namespace pagemill::cache
