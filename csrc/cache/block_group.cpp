#include "cache/block_group.hpp"

#include <algorithm>

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
                         const uint32_t *tokens, uint32_t j, const Retention &wanted,
                         uint32_t tenant) {
    BlockId other = index.find(hash);
    if (other == kNullBlock) {
        index.publish(block, hash, parent, tokens, j == 0);
        if (tree) grow_tree(block, parent, j, block_size);
        order.published(block, wanted, tenant);
        log.stored(group_id, hash, parent, j, tokens, block_size);
        ++counters.num_stored;
        return;
    }
    ++counters.num_duplicates;
    if (pool.ref_count(other) > 0) {
        pool.join_ring(other, block);
        return;
    }
    hand_over(other, block, true);
    pool.make_empty(other, true);
}

// The entry of `from` passes to a block of the same content.
void BlockGroup::hand_over(BlockId from, BlockId to, bool was_evictable) {
    index.move(from, to);
    if (tree) tree->replace(from, to);
    order.moved(from, to, was_evictable);
}

// A tail that the new block goes on from is displaced: EMPTY now, or when its last holder lets go.
bool BlockGroup::grow_tree(BlockId block, const Hash &parent, uint32_t j, uint32_t count) {
    const BlockId before = j == 0 ? kNullBlock : index.find(parent);
    const auto [is_new, displaced] =
        tree->insert(block, before, parent, j, index.token_ids(block), count);
    if (displaced == kNullBlock) return is_new;
    order.dropped(displaced);
    index.drop_tail(displaced);
    if (pool.ref_count(displaced) == 0) pool.make_empty(displaced, true);
    return is_new;
}

void BlockGroup::keep_tail(BlockId block, const Hash &parent, uint32_t j, uint32_t count,
                           const Retention &wanted, uint32_t tenant) {
    if (j > 0 && index.find(parent) == kNullBlock) return;
    if (!grow_tree(block, parent, j, count)) return;
    index.note_tail(block, parent, j == 0);
    order.published(block, wanted, tenant);
}

void BlockGroup::keep_quota(uint32_t tenant) {
    for (BlockId block; (block = order.over_quota(tenant)) != kNullBlock; ++counters.num_evicted)
        evict_block(block);
}

void BlockGroup::take(BlockId block, bool is_hit) {
    if (pool.ref_count(block) == 0) order.became_held(block);
    pool.take_reference(block);
    if (is_hit) order.touched(block);
}

void BlockGroup::request_ended(std::span<const BlockId> blocks, uint32_t num_published,
                               const RequestEnd &end) {
    if (!order.is_on()) return;
    std::vector<BlockId> path;
    for (BlockId block : blocks.first(std::min<size_t>(num_published, blocks.size()))) {
        if (block == kNullBlock) continue;
        while (!index.is_published(block)) block = pool.next(block);  // a twin: round its ring
        path.push_back(block);
    }
    order.request_ended(path, end);
}

void BlockGroup::release(BlockId block) {
    if (!pool.drop_reference(block)) return;
    bool is_published = index.is_published(block);
    if (is_cached(block) && pool.is_alone(block)) {
        pool.make_evictable(block);
        order.became_evictable(block);
        return;
    }
    BlockId oldest_twin = pool.next(block);
    pool.leave_ring(block);
    if (is_published) hand_over(block, oldest_twin, false);
    pool.make_empty(block, false);
}

void BlockGroup::release_all(std::span<const BlockId> blocks) {
    pool.check_release(blocks);
    for (size_t i = blocks.size(); i-- > 0;)
        if (blocks[i] != kNullBlock) release(blocks[i]);
}

// Under plain LRU the next victims are known, so what they lead to is fetched for all of them at
// once: one after the other each would wait for memory five times.
size_t BlockGroup::next_victims(std::span<BlockId> victims) const {
    if (order.is_on()) return 0;
    size_t count = 0;
    for (BlockId block = pool.oldest(); block != kNullBlock && count < victims.size();
         block = pool.next(block))
        victims[count++] = block;
    for (BlockId block : victims.first(count)) index.prefetch(block);
    if (!tree) return count;
    for (BlockId block : victims.first(count)) tree->prefetch_place(block);
    for (BlockId block : victims.first(count)) tree->prefetch_node(block);
    for (BlockId block : victims.first(count)) tree->prefetch_links(block);
    return count;
}

uint32_t BlockGroup::evict(uint32_t n) {
    constexpr size_t kBatch = 16;
    BlockId victims[kBatch];
    uint32_t num_evicted = 0;
    while (num_evicted < n && pool.num_evictable() > 0) {
        size_t count = next_victims({victims, std::min<size_t>(kBatch, n - num_evicted)});
        if (count == 0) {
            victims[count++] = order.victim();
            if (victims[0] == kNullBlock) bug("evict: blocks are evictable, but none is a leaf");
        }
        for (size_t i = 0; i < count; ++i, ++num_evicted) evict_block(victims[i]);
    }
    counters.num_evicted += num_evicted;
    return num_evicted;
}

void BlockGroup::evict_block(BlockId block) {
    order.dropped(block);
    if (tree) tree->remove(block);
    if (index.is_published(block)) {
        log.removed(group_id, index.hash(block));
        index.drop(block);
    } else {
        index.drop_tail(block);
    }
    pool.make_empty(block, true);
}

void BlockGroup::make_room(uint32_t n) {
    if (n > pool.num_empty()) evict(n - pool.num_empty());
    if (n > pool.num_empty()) bug("make_room: the caller has not asked what is available");
}

}  // namespace pagemill::cache
