// (block hash) -> published block, for one layer group. Open addressing, linear probing, removal by
// shifting back: no tombstones. What is published lies beside it: hash, parent's hash, token ids.
#pragma once

#include <cstring>

#include "cache/block_pool.hpp"
#include "cache/chain_hash.hpp"

namespace pagemill::cache {

class FlatIndex {
    struct Slot {
        BlockId block;  // kNullBlock: free
        uint32_t tag;   // the first four bytes of the hash; the home slot is its part of 2^32
    };
    uint32_t block_size_, num_published_ = 0;
    Zeroed<Slot> slots_;
    Zeroed<Hash> hash_, parent_;
    Zeroed<uint32_t> token_ids_;  // [num_blocks, block_size]
    enum State : uint8_t { kPublished = 1, kFirst = 2, kTail = 4 };
    Zeroed<uint8_t> state_;

    static uint32_t tag_of(const Hash &hash) {
        uint32_t tag;
        std::memcpy(&tag, hash.data(), sizeof tag);
        return tag;
    }
    uint32_t home(uint32_t tag) const { return uint32_t(uint64_t(tag) * slots_.size() >> 32); }
    uint32_t next(uint32_t slot) const { return slot + 1 == slots_.size() ? 0 : slot + 1; }
    uint32_t distance(uint32_t from, uint32_t to) const {
        return to >= from ? to - from : to + uint32_t(slots_.size()) - from;
    }
    uint32_t slot_of(BlockId block) const;
    void insert(BlockId block);
    void erase(BlockId block);

public:
    // Without entries nothing can be published, and it has no size to speak of.
    FlatIndex(uint32_t num_blocks, uint32_t block_size, bool has_entries = true);

    uint32_t num_published() const { return num_published_; }
    bool is_published(BlockId block) const { return state_[block] & kPublished; }
    // Published, or a cached tail: a block with fewer tokens, which is in no slot and has no hash.
    bool is_cached(BlockId block) const { return state_[block] & (kPublished | kTail); }
    bool is_first(BlockId block) const { return state_[block] & kFirst; }
    const Hash &hash(BlockId block) const { return hash_[block]; }
    const Hash &parent(BlockId block) const { return parent_[block]; }
    const uint32_t *token_ids(BlockId block) const {
        return token_ids_.data() + size_t(block) * block_size_;
    }
    size_t num_bytes() const;

    BlockId find(const Hash &hash) const;
    // A hash alone is not believed: the parent and the token ids are compared too.
    bool is_same(BlockId block, const Hash &parent, const uint32_t *tokens) const;

    void publish(BlockId block, const Hash &hash, const Hash &parent, const uint32_t *tokens,
                 bool is_first);
    // A tail has its parent's hash with another beginning, so that no other block has it.
    void note_tail(BlockId block, const Hash &parent, bool is_first) {
        parent_[block] = hash_[block] = parent;
        hash_[block][0] ^= 0xff;
        state_[block] = uint8_t(kTail | (is_first ? kFirst : 0));
    }
    void drop_tail(BlockId block) { state_[block] = 0; }
    // The tokens of a block that is partly filled, and not published.
    void note_tokens(BlockId block, const uint32_t *tokens, uint32_t count) {
        std::memcpy(&token_ids_[size_t(block) * block_size_], tokens, 4 * size_t(count));
    }
    void drop(BlockId block);
    // The entry of `from` now names `to`: same content, another place.
    void move(BlockId from, BlockId to);
    // For tests: each of two published blocks gets the other's entry.
    void swap(BlockId a, BlockId b);
    void prefetch(const Hash &hash) const {
        __builtin_prefetch(slots_.data() + home(tag_of(hash)));
    }
    // The entry of this block will be wanted soon.
    void prefetch(BlockId block) const {
        __builtin_prefetch(slots_.data() + home(tag_of(hash_[block])));
    }
    // True when the probe for this published block ends at itself.
    bool is_findable(BlockId block) const { return find(hash_[block]) == block; }
    uint32_t num_slots_in_use() const;
};

}  // namespace pagemill::cache
