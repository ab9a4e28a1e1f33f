// Calls on a whole path or a whole namespace: keep it, forget it; and which tables share blocks.
#include <algorithm>
#include <unordered_map>

#include "cache/bug.hpp"
#include "cache/cache_core.hpp"

namespace pagemill::cache {

namespace {
struct HashOfKey {
    size_t operator()(const Hash &key) const {
        size_t bits;
        std::memcpy(&bits, key.data(), sizeof bits);
        return bits;
    }
};
using ChildCounts = std::unordered_map<Hash, uint32_t, HashOfKey>;
}  // namespace

Retention CacheCore::wanted_now(const Table &table) const {
    Retention wanted = table.retention;
    if (wanted.ttl_ns) wanted.ttl_until_ns = groups_[0]->order.now_ns() + wanted.ttl_ns;
    return wanted;
}

// A pin climbs to the root, so it comes once for the whole path and not with every block.
Retention CacheCore::wanted_of_new(const Table &table) const {
    Retention wanted = wanted_now(table);
    wanted.pin_tenant = 0;
    return wanted;
}

void CacheCore::retain(TableId id, const Retention &asked) {
    Table &kept = table(id);
    kept.retention = asked;
    for (auto &group : groups_) group->order.be_on();
    raise_path(kept);
    ++version_;
}

// What the table has published, also where a twin of it is found in its place.
void CacheCore::raise_path(const Table &kept) {
    const Retention wanted = wanted_now(kept);
    for (uint32_t g = 0; g < num_groups(); ++g) {
        BlockGroup &group = *groups_[g];
        for (uint32_t j = kept.num_published; j-- > 0;) {
            BlockId block = kept.blocks[g][j];
            if (block == kNullBlock) continue;
            while (!group.index.is_published(block)) block = group.pool.next(block);  // a twin
            group.order.set_retention(block, wanted);
            if (!group.window) break;  // the ancestors are raised with it
        }
    }
}

// What goes on from the tokens, and then their own blocks from the last one, as far as nobody holds
// them and nothing else goes on from them. Says how many.
uint32_t CacheCore::forget_prefix(const uint32_t *tokens, uint32_t n, const Hash &root) {
    BlockGroup &first = *groups_[0];
    const uint32_t num_whole = n / config_.block_size * config_.block_size;
    // reads n tokens: the last one is never matched
    const Match path = floor(peek_match(tokens, n + 1, root));
    if (path.num_tokens < num_whole) return 0;
    const std::vector<BlockId> behind =
        first.tree ? first.tree->blocks_behind(root, tokens, n)
                   : first.blocks_under(path.key, {tokens + num_whole, n - num_whole});
    uint32_t num_gone = forget_blocks(behind);
    std::vector<Hash> keys;
    for (BlockId block : path.blocks[0])
        keys.push_back(block == kNullBlock ? Hash{} : first.index.hash(block));
    const uint32_t num_own = first.forget_tail(path.blocks[0]);
    for (uint32_t i = 0; i < num_own; ++i) num_gone += forget_key(keys[keys.size() - 1 - i]);
    ++version_;
    return num_gone + num_own;
}

// Everything under the root that nobody holds.
uint32_t CacheCore::forget_root(const Hash &root) {
    const uint32_t num_gone = forget_blocks(groups_[0]->blocks_under(root));
    ++version_;
    return num_gone;
}

// Blocks of the first group, children before their parents, and those of the other groups with the
// same keys. A window block whose full parent is gone already cannot be traced; no prompt finds it.
uint32_t CacheCore::forget_blocks(const std::vector<BlockId> &blocks) {
    uint32_t num_gone = 0;
    for (BlockId block : blocks) {
        const Hash key = groups_[0]->index.hash(block);
        if (groups_[0]->forget(block)) num_gone += 1 + forget_key(key);
    }
    return num_gone;
}

uint32_t CacheCore::forget_key(const Hash &key) {
    uint32_t num_gone = 0;
    for (uint32_t g = 1; g < num_groups(); ++g)
        if (BlockId block = groups_[g]->index.find(key); block != kNullBlock)
            num_gone += groups_[g]->forget(block);
    return num_gone;
}

// The caller knows that nothing cached goes on from it, but what is held.
bool BlockGroup::forget(BlockId block) {
    if (pool.ref_count(block) > 0 || !is_cached(block)) return false;
    if (tree && !tree->is_last(block)) return false;
    evict_block(block);
    return true;
}

uint32_t BlockGroup::forget_tail(std::span<const BlockId> path) {
    ChildCounts children;
    if (!tree && !window)
        for (BlockId block = 1; block < pool.num_blocks(); ++block)
            if (index.is_published(block)) ++children[index.parent(block)];
    uint32_t num_gone = 0;
    for (size_t j = path.size(); j-- > 0 && path[j] != kNullBlock; ++num_gone) {
        const Hash parent = index.parent(path[j]);
        if (!children.empty() && children[index.hash(path[j])] > 0) break;
        if (!forget(path[j])) break;
        if (!children.empty()) --children[parent];
    }
    return num_gone;
}

// Children before their parents. Without a tree all blocks are looked at once.
std::vector<BlockId> BlockGroup::blocks_under(const Hash &root,
                                              std::span<const uint32_t> tokens) const {
    if (tree) return tree->blocks_under(root);
    std::unordered_map<Hash, std::vector<BlockId>, HashOfKey> children;
    for (BlockId block = 1; block < pool.num_blocks(); ++block)
        if (index.is_published(block)) children[index.parent(block)].push_back(block);
    std::vector<BlockId> out, left = children[root];
    std::erase_if(left, [&](BlockId block) {
        return !std::equal(tokens.begin(), tokens.end(), index.token_ids(block));
    });
    while (!left.empty()) {
        BlockId block = left.back();
        left.pop_back();
        out.push_back(block);
        if (auto found = children.find(index.hash(block)); found != children.end())
            left.insert(left.end(), found->second.begin(), found->second.end());
    }
    std::reverse(out.begin(), out.end());
    return out;
}

// ---- shared prefixes ------------------------------------------------------------------------

namespace {

struct Grouping {
    const std::vector<const std::vector<BlockId> *> &tables;
    std::vector<SharedRun> &runs;

    bool has(uint32_t member, uint32_t j) const { return j < tables[member]->size(); }
    BlockId at(uint32_t member, uint32_t j) const { return (*tables[member])[j]; }

    // All members have the same block j.
    bool agree(const std::vector<uint32_t> &members, uint32_t j) const {
        return std::all_of(members.begin(), members.end(), [&](uint32_t member) {
            return has(member, j) && at(member, j) == at(members[0], j);
        });
    }

    // The members agree on the blocks before `first`. Parts that go on together are runs.
    void part(std::vector<uint32_t> members, uint32_t first) {
        std::erase_if(members, [&](uint32_t member) {
            return !has(member, first) || at(member, first) == kNullBlock;
        });
        std::stable_sort(members.begin(), members.end(), [&](uint32_t a, uint32_t b) {
            return at(a, first) < at(b, first);
        });
        for (size_t i = 0, end; i < members.size(); i = end) {
            for (end = i + 1; end < members.size(); ++end)
                if (at(members[end], first) != at(members[i], first)) break;
            if (end - i < 2) continue;
            std::vector<uint32_t> same(members.begin() + i, members.begin() + end);
            uint32_t next = first + 1;
            while (agree(same, next)) ++next;
            runs.push_back({first, next - first, same});
            part(std::move(same), next);
        }
    }
};

}  // namespace

std::vector<SharedRun> CacheCore::shared_runs(const std::vector<TableId> &ids, uint32_t g) {
    group(g);
    std::vector<const std::vector<BlockId> *> tables;
    std::vector<uint32_t> members;
    for (TableId id : ids) {
        members.push_back(uint32_t(tables.size()));
        tables.push_back(&table(id).blocks[g]);
    }
    std::vector<SharedRun> runs;
    Grouping{tables, runs}.part(std::move(members), 0);
    return runs;
}

}  // namespace pagemill::cache
