#include "cache/flat_index.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "cache/bug.hpp"

namespace pagemill::cache {

// Half as many slots more than blocks: at most two thirds of them are in use.
FlatIndex::FlatIndex(uint32_t num_blocks, uint32_t block_size, bool has_entries)
    : block_size_(block_size),
      slots_(has_entries ? num_blocks + size_t(num_blocks) / 2 + 1 : 1),
      hash_(has_entries ? num_blocks : 0),
      parent_(has_entries ? num_blocks : 0),
      token_ids_(has_entries ? size_t(num_blocks) * block_size : 0),
      state_(num_blocks) {}

size_t FlatIndex::num_bytes() const {
    return slots_.num_bytes() + hash_.num_bytes() + parent_.num_bytes() + token_ids_.num_bytes() +
           state_.num_bytes();
}

BlockId FlatIndex::find(const Hash &hash) const {
    uint32_t tag = tag_of(hash);
    for (uint32_t i = home(tag);; i = next(i)) {
        const Slot &slot = slots_[i];
        if (slot.block == kNullBlock) return kNullBlock;
        if (slot.tag == tag && hash_[slot.block] == hash) return slot.block;
    }
}

bool FlatIndex::is_same(BlockId block, const Hash &parent, const uint32_t *tokens) const {
    return parent_[block] == parent &&
           std::memcmp(token_ids(block), tokens, 4 * size_t(block_size_)) == 0;
}

uint32_t FlatIndex::slot_of(BlockId block) const {
    uint32_t i = home(tag_of(hash_[block]));
    for (; slots_[i].block != block; i = next(i))
        if (slots_[i].block == kNullBlock)
            bug("flat index: block " + std::to_string(block) + " has no entry");
    return i;
}

void FlatIndex::insert(BlockId block) {
    uint32_t tag = tag_of(hash_[block]);
    uint32_t i = home(tag);
    while (slots_[i].block != kNullBlock) i = next(i);
    slots_[i] = {block, tag};
}

// Entries behind the hole move into it when their home slot is at or before the hole, so that a
// probe never meets a free slot before its entry.
void FlatIndex::erase(BlockId block) {
    uint32_t hole = slot_of(block);
    for (uint32_t i = next(hole); slots_[i].block != kNullBlock; i = next(i)) {
        if (distance(home(slots_[i].tag), i) < distance(hole, i)) continue;
        slots_[hole] = slots_[i];
        hole = i;
    }
    slots_[hole] = {kNullBlock, 0};
}

void FlatIndex::publish(BlockId block, const Hash &hash, const Hash &parent,
                        const uint32_t *tokens, bool is_first) {
    hash_[block] = hash;
    parent_[block] = parent;
    std::memcpy(&token_ids_[size_t(block) * block_size_], tokens, 4 * size_t(block_size_));
    state_[block] = uint8_t(kPublished | (is_first ? kFirst : 0));
    insert(block);
    ++num_published_;
}

void FlatIndex::drop(BlockId block) {
    erase(block);
    state_[block] = 0;
    --num_published_;
}

void FlatIndex::move(BlockId from, BlockId to) {
    slots_[slot_of(from)].block = to;
    hash_[to] = hash_[from];
    parent_[to] = parent_[from];
    std::memcpy(&token_ids_[size_t(to) * block_size_], token_ids(from), 4 * size_t(block_size_));
    state_[to] = state_[from];
    state_[from] = 0;
}

void FlatIndex::swap(BlockId a, BlockId b) {
    erase(a);
    erase(b);
    std::swap(hash_[a], hash_[b]);
    std::swap(parent_[a], parent_[b]);
    std::swap(state_[a], state_[b]);
    uint32_t *tokens = token_ids_.data();
    std::swap_ranges(tokens + size_t(a) * block_size_, tokens + size_t(a + 1) * block_size_,
                     tokens + size_t(b) * block_size_);
    insert(a);
    insert(b);
}

uint32_t FlatIndex::num_slots_in_use() const {
    uint32_t count = 0;
    for (size_t i = 0; i < slots_.size(); ++i) count += slots_[i].block != kNullBlock;
    return count;
}

}  // namespace pagemill::cache
