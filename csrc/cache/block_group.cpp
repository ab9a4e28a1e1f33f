#include "cache/block_group.hpp"

#include "cache/bug.hpp"

namespace pagemill::cache {

BlockId BlockGroup::find(const Hash &hash, const Hash &parent, const uint32_t *tokens,
                         uint32_t &num_mismatches) const {
    BlockId block = index.find(hash);
    if (block == kNullBlock || index.is_same(block, parent, tokens)) return block;
    ++num_mismatches;
    return kNullBlock;
}

bool BlockGroup::is_taken(const Hash &hash, const Hash &parent, const uint32_t *tokens) const {
    BlockId other = index.find(hash);
    return other != kNullBlock && !index.is_same(other, parent, tokens);
}

void BlockGroup::publish(BlockId block, const Hash &hash, const Hash &parent,
                         const uint32_t *tokens, uint32_t j) {
    BlockId other = index.find(hash);
    if (other == kNullBlock) {
        index.publish(block, hash, parent, tokens, j == 0);
        if (tree) grow_tree(block, parent, j, block_size);
        log.stored(group_id, hash, parent, j, tokens, block_size);
        ++counters.num_stored;
        return;
    }
    ++counters.num_duplicates;
    if (pool.ref_count(other) > 0) {
        pool.join_ring(other, block);
        return;
    }
    hand_over(other, block);
    pool.make_empty(other, true);
}

// The entry of `from` passes to a block of the same content.
void BlockGroup::hand_over(BlockId from, BlockId to) {
    index.move(from, to);
    if (tree) tree->replace(from, to);
}

// A tail that the new block goes on from is displaced: EMPTY now, or when its last holder lets go.
bool BlockGroup::grow_tree(BlockId block, const Hash &parent, uint32_t j, uint32_t count) {
    const BlockId before = j == 0 ? kNullBlock : index.find(parent);
    const auto [is_new, displaced] =
        tree->insert(block, before, parent, j, index.token_ids(block), count);
    if (displaced != kNullBlock && pool.ref_count(displaced) == 0) pool.make_empty(displaced, true);
    return is_new;
}

void BlockGroup::keep_tail(BlockId block, const Hash &parent, uint32_t j, uint32_t count) {
    if (j > 0 && index.find(parent) == kNullBlock) return;
    grow_tree(block, parent, j, count);
}

void BlockGroup::release(BlockId block) {
    if (!pool.drop_reference(block)) return;
    bool is_published = index.is_published(block);
    if (is_cached(block) && pool.is_alone(block)) {
        pool.make_evictable(block);
        return;
    }
    BlockId oldest_twin = pool.next(block);
    pool.leave_ring(block);
    if (is_published) hand_over(block, oldest_twin);
    pool.make_empty(block, false);
}

void BlockGroup::release_all(std::span<const BlockId> blocks) {
    pool.check_release(blocks);
    for (size_t i = blocks.size(); i-- > 0;)
        if (blocks[i] != kNullBlock) release(blocks[i]);
}

uint32_t BlockGroup::evict(uint32_t n) {
    uint32_t num_evicted = 0;
    for (; num_evicted < n && pool.num_evictable() > 0; ++num_evicted) {
        BlockId block = pool.oldest();
        index.prefetch(pool.next(block));
        evict_block(block);
    }
    counters.num_evicted += num_evicted;
    return num_evicted;
}

void BlockGroup::evict_block(BlockId block) {
    if (tree) tree->remove(block);
    if (index.is_published(block)) {
        log.removed(group_id, index.hash(block));
        index.drop(block);
    }
    pool.make_empty(block, true);
}

void BlockGroup::make_room(uint32_t n) {
    if (n > pool.num_empty()) evict(n - pool.num_empty());
    if (n > pool.num_empty()) bug("make_room: the caller has not asked what is available");
}

}  // namespace pagemill::cache
