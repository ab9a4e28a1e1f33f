#include "cache/cache_core.hpp"

#include <algorithm>

#include "cache/bug.hpp"

namespace pagemill::cache {

static constexpr int kSlotBits = 24;

static uint32_t ceil_div(uint32_t count, uint32_t size) {
    return uint32_t((uint64_t(count) + size - 1) / size);
}

CacheCore::CacheCore(const CoreConfig &config) : config_(config), chain_(config.block_size) {
    log_.is_on = config.has_events;
    for (uint32_t g = 0; g < config.num_blocks.size(); ++g) {
        uint32_t size = config.num_blocks[g];
        if (size < 2 || size > uint32_t(1) << 30) bug("a pool has 2 to 2^30 blocks");
        uint32_t tokens = config.policy_tokens ? config.policy_tokens : config.block_size;
        groups_.push_back(std::make_unique<BlockGroup>(g, size, config.windows.at(g),
                                                       config.block_size, log_, config.has_index,
                                                       config.eviction, tokens));
    }
    BlockGroup &first = *groups_.at(0);
    if (config.has_index && config.has_tree && !first.window)
        first.tree.emplace(first.index, config.num_blocks[0], config.block_size);
}

BlockGroup &CacheCore::group(uint32_t index) {
    if (index >= groups_.size()) bug("there is no layer group " + std::to_string(index));
    return *groups_[index];
}

// ---- tables ---------------------------------------------------------------------------------

Table &CacheCore::table(TableId id) {
    uint64_t slot = id & ((1u << kSlotBits) - 1);
    if (slot >= tables_.size() || !tables_[slot].is_open ||
        tables_[slot].generation != id >> kSlotBits)
        bug("table " + std::to_string(id) + " is not open (released already?)");
    return tables_[slot];
}

TableId CacheCore::new_table() {
    if (free_slots_.empty()) {
        if (tables_.size() >> kSlotBits) bug("too many open tables");
        free_slots_.push_back(uint32_t(tables_.size()));
        tables_.emplace_back();
    }
    uint32_t slot = free_slots_.back();
    free_slots_.pop_back();
    Table &table = tables_[slot];
    ++table.generation;  // from 1: no table has id 0, no id comes twice
    table.is_open = true;
    ++num_open_;
    return table.generation << kSlotBits | slot;
}

TableId CacheCore::open(const Match &match, bool is_resumed, uint32_t tenant) {
    if (match.version != version_) bug("open: the cache has changed since this match was made");
    TableId id = new_table();
    Table &fresh = table(id);
    fresh.is_chain_stopped = false;
    fresh.num_asked = match.num_asked_tokens;
    fresh.num_cached = fresh.num_committed = match.num_tokens;
    fresh.num_published = match.num_tokens / config_.block_size;
    fresh.key = match.key;
    fresh.tail = kNullBlock;
    fresh.retention = {};
    fresh.tenant = tenant;
    fresh.blocks = match.blocks;
    fresh.first_live.clear();
    for (uint32_t g = 0; g < num_groups(); ++g) {
        uint32_t first = groups_[g]->first_live_block(match.num_tokens);
        fresh.first_live.push_back(std::min(first, fresh.num_published));
        for (BlockId block : match.blocks[g])
            if (block != kNullBlock) groups_[g]->take(block, !is_resumed);
    }
    counters_.num_mismatches += match.num_mismatches;
    (is_resumed ? counters_.num_resumes : counters_.num_queries) += 1;
    (is_resumed ? counters_.num_resumed_tokens : counters_.num_hit_tokens) += match.num_tokens;
    if (!is_resumed) counters_.num_asked_tokens += match.num_asked_tokens;
    ++version_;
    return id;
}

TableId CacheCore::fork(TableId id) {
    if (table(id).num_copies > 0) bug("fork: copies into this table are not released yet");
    TableId fresh_id = new_table();  // may move the tables
    const Table &from = table(id);
    Table &to = table(fresh_id);
    uint64_t generation = to.generation;
    to = from;
    to.generation = generation;
    to.num_copies = 0;
    // Slots behind the last computed token are not shared: both would write them.
    uint32_t num_shared = ceil_div(from.num_committed, config_.block_size);
    for (uint32_t g = 0; g < num_groups(); ++g) {
        if (to.blocks[g].size() > num_shared) to.blocks[g].resize(num_shared);
        for (BlockId block : to.blocks[g])
            if (block != kNullBlock) groups_[g]->pool.take_reference(block);
    }
    ++version_;
    return fresh_id;
}

void CacheCore::release(TableId id, const RequestEnd &end) {
    Table &old = table(id);
    for (uint32_t g = 0; g < num_groups(); ++g) groups_[g]->pool.check_release(old.blocks[g]);
    old.end = end;
    old.end.num_asked_blocks = old.num_asked ? (old.num_asked - 1) / config_.block_size : 0;
    old.end.num_hit_blocks = old.num_cached / config_.block_size;
    old.is_open = false;
    old.is_closing = old.num_copies > 0;
    --num_open_;
    if (!old.is_closing) close(uint32_t(id & ((1u << kSlotBits) - 1)));
    ++version_;
}

// What a copy reads is held by the table it is made for, and so is all that comes before it.
void CacheCore::close(uint32_t slot) {
    Table &old = tables_[slot];
    if (!old.retention.is_default()) raise_path(old);
    keep_tail(old);
    for (uint32_t g = 0; g < num_groups(); ++g) {
        groups_[g]->request_ended(old.blocks[g], old.num_published, old.end);
        groups_[g]->release_all(old.blocks[g]);
        old.blocks[g].clear();
        groups_[g]->keep_quota(old.tenant);
    }
    old.is_closing = false;
    free_slots_.push_back(slot);
}

// ---- slots ----------------------------------------------------------------------------------

// The block that the next token goes into is partly filled and others hold it too, or may find it.
bool CacheCore::must_copy(const Table &table, uint32_t g, uint32_t num_tokens) const {
    if (num_tokens <= table.num_committed || table.num_committed % config_.block_size == 0)
        return false;
    BlockId block = table.blocks[g][table.num_committed / config_.block_size];
    return groups_[g]->pool.ref_count(block) > 1 || groups_[g]->is_cached(block);
}

uint32_t CacheCore::num_missing(const Table &table, uint32_t g, uint32_t num_tokens) const {
    uint32_t wanted = ceil_div(num_tokens, config_.block_size);
    uint32_t have = uint32_t(table.blocks[g].size());
    return (wanted > have ? wanted - have : 0) + must_copy(table, g, num_tokens);
}

bool CacheCore::extend(TableId id, uint32_t num_tokens, std::vector<Copy> &copies) {
    Table &grown = table(id);
    uint32_t num_wanted = 0;
    for (uint32_t g = 0; g < num_groups(); ++g) {
        uint32_t missing = num_missing(grown, g, num_tokens);
        if (missing > groups_[g]->pool.num_available()) return false;
        num_wanted += missing;
    }
    if (num_wanted == 0) return true;
    uint32_t num_entries = ceil_div(num_tokens, config_.block_size);
    for (uint32_t g = 0; g < num_groups(); ++g) {
        BlockGroup &group = *groups_[g];
        std::vector<BlockId> &blocks = grown.blocks[g];
        group.make_room(num_missing(grown, g, num_tokens));
        if (must_copy(grown, g, num_tokens)) {
            // The table's reference to the source becomes the copy's.
            BlockId &entry = blocks[grown.num_committed / config_.block_size];
            copies.push_back({g, entry, group.pool.allocate(entry)});
            entry = copies.back().target;
            pending_copies_.push_back({copies.back(), uint32_t(id & ((1u << kSlotBits) - 1))});
            ++grown.num_copies;
            ++group.counters.num_copies;
        }
        while (blocks.size() < num_entries)
            blocks.push_back(group.pool.allocate(blocks.empty() ? kNullBlock : blocks.back()));
    }
    ++version_;
    return true;
}

void CacheCore::release_copies(const std::vector<Copy> &copies) {
    std::vector<PendingCopy> left = pending_copies_, done;
    for (const Copy &copy : copies) {
        auto found = std::find_if(left.begin(), left.end(),
                                  [&](const PendingCopy &other) { return other.copy == copy; });
        if (found == left.end())
            bug("release_copies: block " + std::to_string(copy.source) + " -> " +
                std::to_string(copy.target) + " is not being copied (released already?)");
        done.push_back(*found);
        left.erase(found);
    }
    pending_copies_ = std::move(left);
    for (const auto &[copy, slot] : done) {
        groups_[copy.group]->release(copy.source);
        if (--tables_[slot].num_copies == 0 && tables_[slot].is_closing) close(slot);
    }
    ++version_;
}

// ---- publishing -----------------------------------------------------------------------------

void CacheCore::commit(TableId id, const uint32_t *tokens, size_t num_known,
                       uint32_t num_computed) {
    Table &grown = table(id);
    if (num_computed < grown.num_committed) bug("commit: computed tokens cannot become fewer");
    if (num_computed > num_known) bug("commit: more tokens computed than known");
    for (uint32_t g = 0; g < num_groups(); ++g)
        if (ceil_div(num_computed, config_.block_size) > grown.blocks[g].size())
            bug("commit: tokens beyond the slots that extend gave");
    grown.num_committed = num_computed;
    if (config_.has_index && !grown.is_chain_stopped) publish_full_blocks(grown, tokens);
    note_tail(grown, tokens);
    give_back(grown);
    ++version_;
}

// The tokens of the block that is being filled, for the tree to keep when the table is released.
// Only where the model has one pool: a tail is of use when every layer has its tokens.
void CacheCore::note_tail(Table &table, const uint32_t *tokens) {
    table.tail = kNullBlock;
    const uint32_t size = config_.block_size, j = table.num_committed / size;
    if (num_groups() > 1 || !tree() || table.num_committed % size == 0) return;
    const BlockId block = table.blocks[0][j];
    if (groups_[0]->pool.ref_count(block) > 1 || groups_[0]->is_cached(block)) return;
    groups_[0]->index.note_tokens(block, tokens + size_t(j) * size, table.num_committed % size);
    table.tail = block;
}

void CacheCore::keep_tail(Table &table) {
    const uint32_t size = config_.block_size, j = table.num_committed / size;
    if (table.tail == kNullBlock || table.is_chain_stopped || table.num_published < j) return;
    if (table.blocks[0][j] != table.tail || groups_[0]->pool.ref_count(table.tail) > 1) return;
    groups_[0]->keep_tail(table.tail, table.key, j, table.num_committed % size,
                          wanted_of_new(table), table.tenant);
}

// In order, and never a block that others hold too: to a fork made while a step ran it is a partly
// filled block, or the source of a copy. It is published later, when they have let go of it.
void CacheCore::publish_full_blocks(Table &table, const uint32_t *tokens) {
    const uint32_t num_full = table.num_committed / config_.block_size;
    const Retention wanted = wanted_of_new(table);
    for (; table.num_published < num_full; ++table.num_published) {
        uint32_t j = table.num_published;
        for (uint32_t g = 0; g < num_groups(); ++g)
            if (BlockId block = table.blocks[g][j]; block != kNullBlock)
                if (groups_[g]->pool.ref_count(block) > 1) return;
        const uint32_t *block_tokens = tokens + size_t(j) * config_.block_size;
        Hash key = chain_(table.key, block_tokens);
        for (uint32_t g = 0; g < num_groups(); ++g)
            table.is_chain_stopped |= groups_[g]->is_taken(key, table.key, block_tokens);
        if (table.is_chain_stopped) {
            ++counters_.num_mismatches;
            return;
        }
        for (uint32_t g = 0; g < num_groups(); ++g)
            if (BlockId block = table.blocks[g][j]; block != kNullBlock)
                groups_[g]->publish(block, key, table.key, block_tokens, j, wanted,
                                    table.tenant);
        table.key = key;
    }
}

// The next token reads from its window on: what lies wholly before is given back, oldest first. Not
// while copies into the table are pending: their targets must not become others'.
void CacheCore::give_back(Table &table) {
    if (table.num_copies > 0) return;
    for (uint32_t g = 0; g < num_groups(); ++g) {
        std::vector<BlockId> &blocks = table.blocks[g];
        uint32_t end = std::min(groups_[g]->first_live_block(table.num_committed),
                                uint32_t(blocks.size()));
        for (uint32_t &j = table.first_live[g]; j < end; ++j) {
            groups_[g]->release(blocks[j]);
            blocks[j] = kNullBlock;
        }
    }
}

uint32_t CacheCore::evict(uint32_t index, uint32_t n) {
    ++version_;
    return group(index).evict(n);
}

void CacheCore::advance(uint64_t now_ns) {
    for (auto &group : groups_) group->order.advance(now_ns);
}

bool CacheCore::reset() {
    if (num_open_ > 0 || !pending_copies_.empty()) return false;
    bool was_on = log_.is_on;
    log_.is_on = false;  // one word for all: the caller says that everything is gone
    for (auto &group : groups_) {
        uint64_t num_evicted = group->counters.num_evicted;
        group->evict(group->pool.num_blocks());
        group->counters.num_evicted = num_evicted;
    }
    log_.is_on = was_on;
    ++version_;
    return true;
}

}  // namespace pagemill::cache
