// Looking into the index. A match of n tokens needs, in every full group, all blocks of [0, n), and
// in a window group those of [n - w + 1, n); n is the largest on which all groups agree.
#include <algorithm>

#include "cache/bug.hpp"
#include "cache/cache_core.hpp"

namespace pagemill::cache {

Match CacheCore::peek_match(const uint32_t *tokens, uint32_t num_tokens, const Hash &root,
                            const Hash *known_keys) {
    Match match;
    match.root = match.key = root;
    match.num_asked_tokens = num_tokens;
    match.version = version_;
    match.blocks.resize(num_groups());
    if (!config_.has_index || num_tokens == 0) return match;
    std::vector<Hash> keys =
        tree() ? match_tree(tokens, num_tokens - 1, match)
               : match_full(tokens, (num_tokens - 1) / config_.block_size, known_keys, match);
    if (tree() && num_groups() == 1) return match;
    uint32_t num_blocks = uint32_t(keys.size()), before;
    do {
        before = num_blocks;
        for (uint32_t g = 0; g < num_groups(); ++g)
            if (groups_[g]->window) num_blocks = fit_window(g, num_blocks, keys, tokens, match);
    } while (num_blocks != before);
    keep_blocks(num_blocks, keys, tokens, match);
    return match;
}

// Hashes as far as all full groups have the block; what they have goes into match.blocks.
std::vector<Hash> CacheCore::match_full(const uint32_t *tokens, uint32_t max_blocks,
                                        const Hash *known_keys, Match &match) {
    constexpr uint32_t kAhead = 8;
    std::vector<Hash> keys;
    Hash parent = match.root;
    for (uint32_t j = 0; j < max_blocks; ++j) {
        const uint32_t *block_tokens = tokens + size_t(j) * config_.block_size;
        if (known_keys && j + kAhead < max_blocks)
            for (auto &group : groups_) group->index.prefetch(known_keys[j + kAhead]);
        Hash key = known_keys ? known_keys[j] : chain_(parent, block_tokens);
        for (uint32_t g = 0; g < num_groups(); ++g) {
            if (groups_[g]->window) continue;
            BlockId block = groups_[g]->find(key, parent, block_tokens, match.num_mismatches);
            if (block == kNullBlock) return keys;
            match.blocks[g].push_back(block);
        }
        keys.push_back(key);
        parent = key;
    }
    return keys;
}

RadixIndex *CacheCore::tree() const {
    return groups_[0]->tree ? &*groups_[0]->tree : nullptr;
}

// The exact match of the tree, which needs no hashing. With several groups only whole blocks count:
// the keys that it found them under lead to those of the other groups.
std::vector<Hash> CacheCore::match_tree(const uint32_t *tokens, uint32_t num_tokens,
                                        Match &match) {
    const FlatIndex &index = groups_[0]->index;
    const uint32_t size = config_.block_size;
    match.num_tokens = tree()->match(match.root, tokens, num_tokens, match.blocks[0]);
    std::vector<Hash> keys;
    if (match.num_tokens >= size)
        match.key = index.hash(match.blocks[0][match.num_tokens / size - 1]);
    if (num_groups() == 1) return keys;
    for (uint32_t j = 0; j < match.num_tokens / size; ++j) {
        const Hash &key = index.hash(match.blocks[0][j]);
        const Hash &parent = j ? keys[j - 1] : match.root;
        for (uint32_t g = 1; g < num_groups(); ++g) {
            if (groups_[g]->window) continue;
            BlockId block =
                groups_[g]->find(key, parent, tokens + size_t(j) * size, match.num_mismatches);
            if (block == kNullBlock) return keys;
            match.blocks[g].push_back(block);
        }
        keys.push_back(key);
    }
    return keys;
}

Match CacheCore::floor(const Match &match) const {
    Match out = match;
    out.num_tokens -= match.num_tokens % config_.block_size;
    for (auto &blocks : out.blocks) blocks.resize(out.num_tokens / config_.block_size);
    return out;
}

// num_blocks, where the group has the window before that many blocks; else the highest block that
// is missing, since nothing above it that reads it can match.
uint32_t CacheCore::fit_window(uint32_t g, uint32_t num_blocks, const std::vector<Hash> &keys,
                               const uint32_t *tokens, Match &match) const {
    const BlockGroup &group = *groups_[g];
    const uint32_t first = group.first_live_block(num_blocks * config_.block_size);
    for (uint32_t j = num_blocks; j-- > first;) {
        const Hash &parent = j ? keys[j - 1] : match.root;
        const uint32_t *block_tokens = tokens + size_t(j) * config_.block_size;
        if (group.find(keys[j], parent, block_tokens, match.num_mismatches) == kNullBlock) return j;
    }
    return num_blocks;
}

void CacheCore::keep_blocks(uint32_t num_blocks, const std::vector<Hash> &keys,
                            const uint32_t *tokens, Match &match) const {
    match.num_tokens = num_blocks * config_.block_size;
    match.key = num_blocks ? keys[num_blocks - 1] : match.root;
    for (uint32_t g = 0; g < num_groups(); ++g) {
        match.blocks[g].resize(num_blocks, kNullBlock);
        if (!groups_[g]->window) continue;
        for (uint32_t j = groups_[g]->first_live_block(match.num_tokens); j < num_blocks; ++j) {
            const Hash &parent = j ? keys[j - 1] : match.root;
            uint32_t num_seen_mismatches = 0;
            match.blocks[g][j] = groups_[g]->find(
                keys[j], parent, tokens + size_t(j) * config_.block_size, num_seen_mismatches);
        }
    }
}

// Needed of a pool = blocks to allocate + matched blocks that are evictable: opening the table
// takes those off the list, so they are not there to be evicted. A window group never holds more
// than its window and a chunk; a matched block that others hold does not come back when it leaves
// the window, so it is not set off against that. The reserve is asked of full groups only: a window
// group is sized by its sequences and grows no further.
bool CacheCore::can_admit(const Match &match, uint32_t num_tokens, uint32_t reserve_blocks,
                          uint32_t chunk_tokens) const {
    if (match.version != version_) bug("can_admit: the cache has changed since this match");
    const uint32_t size = config_.block_size;
    for (uint32_t g = 0; g < num_groups(); ++g) {
        const BlockGroup &group = *groups_[g];
        uint64_t num_leaving = 0;
        for (BlockId block : match.blocks[g])
            num_leaving += block != kNullBlock && group.pool.ref_count(block) == 0;
        uint64_t num_entries = (uint64_t(num_tokens) + size - 1) / size;
        uint64_t have = match.blocks[g].size();
        bool has_copy = match.num_tokens % size && num_tokens > match.num_tokens;
        uint64_t needed = (num_entries > have ? num_entries - have : 0) + num_leaving + has_copy;
        if (group.window && chunk_tokens) {
            uint64_t reach = uint64_t(group.window) - 1 + chunk_tokens;
            needed = std::min(needed, (reach + size - 1) / size + 1);
        }
        uint64_t reserve = group.window ? 0 : reserve_blocks;
        if (needed + reserve > group.pool.num_available()) return false;
    }
    return true;
}

}  // namespace pagemill::cache
