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
                         const uint32_t *tokens, bool is_first) {
    BlockId other = index.find(hash);
    if (other == kNullBlock) {
        index.publish(block, hash, parent, tokens, is_first);
        order.published(block);
        log.stored(group_id, hash, parent, tokens, block_size);
        ++counters.num_stored;
        return;
    }
    ++counters.num_duplicates;
    if (pool.ref_count(other) > 0) {
        pool.join_ring(other, block);
        return;
    }
    index.move(other, block);
    order.moved(other, block, true);
    pool.make_empty(other, true);
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
    if (is_published && pool.is_alone(block)) {
        pool.make_evictable(block);
        order.became_evictable(block);
        return;
    }
    BlockId oldest_twin = pool.next(block);
    pool.leave_ring(block);
    if (is_published) {
        index.move(block, oldest_twin);
        order.moved(block, oldest_twin, false);
    }
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
        BlockId block = order.victim();
        index.prefetch(pool.next(block));
        order.dropped(block);
        log.removed(group_id, index.hash(block));
        index.drop(block);
        pool.make_empty(block, true);
    }
    counters.num_evicted += num_evicted;
    return num_evicted;
}

void BlockGroup::make_room(uint32_t n) {
    if (n > pool.num_empty()) evict(n - pool.num_empty());
    if (n > pool.num_empty()) bug("make_room: the caller has not asked what is available");
}

}  // namespace pagemill::cache
