// One layer group: its pool and its index, and the moves that touch both.
//
// A hash is published by one block. A second block of the same content, computed at the same time,
// is not merged into the first, since tables only ever grow: it is held as a *duplicate*. Two rules
// keep the published block held for as long as any block of that content is:
//   commit finds the published block evictable: the entry moves to the new block, the old is EMPTY;
//   the published block loses its last holder: the entry moves to its oldest duplicate.
// With a tree the rest of a sequence, less than a block, may stay as a *cached tail*: evictable
// like a published block, but without a hash, and only ever copied.
// So in a full group a table always holds, for each of its published blocks, the block or a twin of
// it, and releases tail first: a parent is never older in the list than its children, and the
// oldest evictable block is always a leaf. Which leaf goes first is the order's business.
#pragma once

#include <optional>
#include <span>

#include "cache/block_pool.hpp"
#include "cache/eviction/order.hpp"
#include "cache/event_log.hpp"
#include "cache/radix_index.hpp"

namespace pagemill::cache {

struct GroupCounters {
    uint64_t num_stored = 0, num_evicted = 0, num_duplicates = 0, num_copies = 0;
};

struct BlockGroup {
    uint32_t group_id, window, block_size;  // window 0: every token is kept
    BlockPool pool;
    FlatIndex index;
    std::optional<RadixIndex> tree;
    EvictionOrder order;
    GroupCounters counters;
    EventLog &log;

    // policy_tokens: tokens of a block as the eviction policy counts them.
    BlockGroup(uint32_t id, uint32_t num_blocks, uint32_t window_tokens, uint32_t tokens_per_block,
               EventLog &event_log, bool has_index, const std::string &eviction,
               uint32_t policy_tokens)
        : group_id(id),
          window(window_tokens),
          block_size(tokens_per_block),
          pool(num_blocks),
          index(num_blocks, tokens_per_block, has_index),
          order(pool, index, window_tokens == 0, eviction, policy_tokens),
          log(event_log) {}

    // The first block that a token at position `next` still reads; those before left the window.
    uint32_t first_live_block(uint32_t next) const {
        return window && next + 1 > window ? (next + 1 - window) / block_size : 0;
    }

    // A published block with exactly this content, or kNullBlock. Counts hashes that lied.
    BlockId find(const Hash &hash, const Hash &parent, const uint32_t *tokens,
                 uint32_t &num_mismatches) const;

    // The hash is taken by a block of other content.
    bool is_taken(const Hash &hash, const Hash &parent, const uint32_t *tokens) const;
    // Block j of a chain, full, final and held, becomes findable, or a duplicate of one that is.
    void publish(BlockId block, const Hash &hash, const Hash &parent, const uint32_t *tokens,
                 uint32_t j, const Retention &wanted, uint32_t tenant);
    // Findable, or a cached tail: evictable when nobody holds it, and never written.
    bool is_cached(BlockId block) const { return index.is_cached(block); }
    // The first `count` tokens of block j, held once and never published, stay in the tree, unless
    // they are there already. Its token ids have been noted in the index.
    void keep_tail(BlockId block, const Hash &parent, uint32_t j, uint32_t count,
                   const Retention &wanted, uint32_t tenant);
    // Evicts what a tenant has over its quota, as far as nobody holds it.
    void keep_quota(uint32_t tenant);

    // One holder more of a published block that a prompt found.
    void take(BlockId block, bool is_hit);
    // The table with these blocks ends; its first num_published are findable, or twins of such.
    void request_ended(std::span<const BlockId> blocks, uint32_t num_published,
                       const RequestEnd &end);

    // One holder less: EMPTY, EVICTABLE, or handed over, as the block's state says.
    void release(BlockId block);
    // Checked first as a whole; released from the last to the first.
    void release_all(std::span<const BlockId> blocks);

    // Evicts up to n blocks in the order of eviction; says how many.
    uint32_t evict(uint32_t n);
    // Forgets an evictable block.
    void evict_block(BlockId block);
    // Of a path, from its end: what is evictable and has nothing cached behind it. Says how many.
    uint32_t forget_tail(std::span<const BlockId> path);
    // An evictable block goes; else false, and nothing changes.
    bool forget(BlockId block);
    // All under a root, or a key; without a tree also only those that go on with these tokens.
    std::vector<BlockId> blocks_under(const Hash &root,
                                      std::span<const uint32_t> tokens = {}) const;
    // Evicts only as far as needed; the pool must have n blocks available.
    void make_room(uint32_t n);

private:
    size_t next_victims(std::span<BlockId> victims) const;
    void hand_over(BlockId from, BlockId to, bool was_evictable);
    bool grow_tree(BlockId block, const Hash &parent, uint32_t j, uint32_t count);
};

}  // namespace pagemill::cache
