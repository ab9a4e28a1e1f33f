// Walks the cache and names the first invariant (of docs/design.md) that does not hold.
#include "cache/cache_core.hpp"

namespace pagemill::cache {

using Found = std::optional<Failure>;

static Found broken(int invariant, const BlockGroup &group, BlockId block, const char *words) {
    return Failure{invariant, "group " + std::to_string(group.group_id) + ", block " +
                                  std::to_string(block) + ": " + words};
}

Found CacheCore::check(int level) {
    if (Found found = check_counts()) return found;
    if (level < 1) return {};
    for (const auto &group : groups_) {
        if (Found found = check_references(*group)) return found;
        if (Found found = check_list(*group)) return found;
        if (Found found = check_tables(*group)) return found;
    }
    if (level < 2) return {};
    for (const auto &group : groups_)
        if (Found found = check_index(*group)) return found;
    return {};
}

Found CacheCore::check_counts() const {
    for (const auto &group : groups_) {
        const BlockPool &pool = group->pool;
        uint64_t sum = uint64_t(pool.num_empty()) + pool.num_evictable();
        if (sum > pool.num_blocks() - 1)
            return broken(1, *group, kNullBlock, "more blocks are free than the pool has");
        if (num_open_ == 0 && pending_copies_.empty() && pool.num_held() > 0)
            return broken(1, *group, kNullBlock, "blocks are held, but no table is open");
    }
    return {};
}

Found CacheCore::check_references(const BlockGroup &group) const {
    const BlockPool &pool = group.pool;
    std::vector<uint32_t> holders(pool.num_blocks(), 0);
    for (const Table &table : tables_)
        if (table.is_open || table.is_closing)
            for (BlockId block : table.blocks[group.group_id]) ++holders[block];
    for (const auto &[copy, slot] : pending_copies_)
        if (copy.group == group.group_id) ++holders[copy.source];
    uint32_t num_empty = 0, num_held = 0;
    for (BlockId block = 1; block < pool.num_blocks(); ++block) {
        if (pool.ref_count(block) != holders[block])
            return broken(2, group, block, "its reference count is not its number of holders");
        if (pool.is_empty(block) && (holders[block] || group.is_cached(block)))
            return broken(1, group, block, "it is empty, yet held or cached");
        num_empty += pool.is_empty(block);
        num_held += holders[block] > 0;
        if (!pool.is_empty(block) && !holders[block] && !group.is_cached(block))
            return broken(1, group, block, "it is neither empty, held nor cached: lost");
    }
    if (pool.is_empty(kNullBlock) || pool.ref_count(kNullBlock))
        return broken(1, group, kNullBlock, "the null block was handed out");
    if (num_empty != pool.num_empty() || num_held != pool.num_held())
        return broken(1, group, kNullBlock, "empty + evictable + held is not the pool");
    return {};
}

Found CacheCore::check_list(const BlockGroup &group) const {
    const BlockPool &pool = group.pool;
    uint32_t length = 0;
    BlockId before = kNullBlock;
    for (BlockId block = pool.oldest(); block != kNullBlock; block = pool.next(block)) {
        if (pool.prev(block) != before) return broken(1, group, block, "its links disagree");
        if (pool.ref_count(block) || !group.is_cached(block))
            return broken(1, group, block, "it is in the evictable list, yet held or not cached");
        if (++length > pool.num_evictable()) break;
        before = block;
    }
    if (length != pool.num_evictable())
        return broken(1, group, before, "the evictable list is not as long as it is said to be");
    return {};
}

Found CacheCore::check_tables(const BlockGroup &group) const {
    const BlockPool &pool = group.pool;
    for (const Table &table : tables_) {
        if (!table.is_open) continue;
        const auto &blocks = table.blocks[group.group_id];
        const uint32_t size = config_.block_size;
        const uint32_t num_filled = (table.num_committed + size - 1) / size;
        for (uint32_t j = 0; j < blocks.size(); ++j) {
            if ((blocks[j] == kNullBlock) != (j < table.first_live[group.group_id]))
                return broken(2, group, blocks[j], "its table keeps not what the window says");
            bool is_fixed = pool.ref_count(blocks[j]) > 1 || group.is_cached(blocks[j]);
            if (j >= num_filled && is_fixed)
                return broken(4, group, blocks[j], "to be written, yet it is shared or published");
            if (!config_.has_index || blocks[j] == kNullBlock) continue;
            if (j == num_filled - 1 && table.num_committed % size) continue;  // maybe to be copied
            bool has_twin = group.index.is_published(blocks[j]) || !pool.is_alone(blocks[j]);
            if (has_twin != (j < table.num_published))
                return broken(5, group, blocks[j], "what its table says of its hash is not so");
        }
    }
    return {};
}

Found CacheCore::check_index(const BlockGroup &group) {
    const BlockPool &pool = group.pool;
    const FlatIndex &index = group.index;
    std::vector<uint32_t> place(pool.num_blocks(), UINT32_MAX);  // held: the most recent of all
    std::vector<uint32_t> num_children(pool.num_blocks(), 0);
    uint32_t length = 0, num_published = 0;
    for (BlockId block = pool.oldest(); block != kNullBlock; block = pool.next(block))
        place[block] = length++;
    for (BlockId block = 1; block < pool.num_blocks(); ++block) {
        if (!index.is_cached(block)) continue;
        num_published += index.is_published(block);
        if (index.is_published(block) && !index.is_findable(block))
            return broken(5, group, block, "the index does not find it");
        if (index.is_published(block) &&
            chain_(index.parent(block), index.token_ids(block)) != index.hash(block))
            return broken(5, group, block, "its tokens do not hash to its key");
        if (group.window || index.is_first(block)) continue;
        BlockId parent = index.find(index.parent(block));
        if (parent == kNullBlock) return broken(3, group, block, "its parent is not cached");
        ++num_children[parent];
        if (!group.order.is_on() && place[parent] < place[block])
            return broken(3, group, block, "its parent would be evicted before it");
    }
    if (Found found = check_tree(group)) return found;
    for (BlockId block = 1; group.order.is_on() && block < pool.num_blocks(); ++block)
        if (group.is_cached(block))
            if (const char *words = group.order.wrong_with(block, num_children[block]))
                return broken(3, group, block, words);
    if (num_published != index.num_published() || num_published != index.num_slots_in_use())
        return broken(5, group, kNullBlock, "the index has entries of no published block");
    return {};
}

// The tree holds the published blocks and tails; each stands behind its parent.
Found CacheCore::check_tree(const BlockGroup &group) const {
    if (!group.tree) return {};
    uint32_t num_cached = 0;
    for (BlockId block = 1; block < group.pool.num_blocks(); ++block) {
        num_cached += group.is_cached(block);
        if (group.is_cached(block) != group.tree->contains(block))
            return broken(5, group, block, "it is cached, yet not in the tree, or the reverse");
    }
    if (auto words = group.tree->check(num_cached))
        return broken(5, group, kNullBlock, words->c_str());
    return {};
}

}  // namespace pagemill::cache
