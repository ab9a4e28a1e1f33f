// The cache of all layer groups together: tables, matches, and the order of the calls below.
// Knows no request, tensor or model. Not for several threads at once.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cache/block_group.hpp"

namespace pagemill::cache {

using TableId = uint64_t;

struct CoreConfig {
    std::vector<uint32_t> num_blocks;  // a group, with its null block
    std::vector<uint32_t> windows;     // a group; 0: every token is kept
    uint32_t block_size;
    bool has_index, has_tree;
    bool has_events;
    std::string eviction = "lru";
    uint32_t policy_tokens = 0;  // tokens of a block as eviction counts them; 0: block_size
};

// What a look into the index found. blocks[group] holds an entry for each block of num_tokens, with
// the null block where a window does not reach. With a tree the last one may be partly matched: it
// is to be copied before it is written.
struct Match {
    Hash root{}, key{};  // key: of the last whole matched block; the root where there is none
    uint32_t num_tokens = 0, num_asked_tokens = 0, num_mismatches = 0;
    uint64_t version = 0;
    std::vector<std::vector<BlockId>> blocks;
};

// Intervals of a table (in tokens; num_published in blocks):
//
//     0 .... num_published * B .... num_committed .... blocks.size() * B
//     | findable, or twin  | computed, not | slots: written by the
//     | of a findable one  | yet full      | steps that run
struct Table {
    uint64_t generation = 0;
    bool is_open = false;
    bool is_closing = false;  // released, but copies into it are still being made
    uint32_t num_copies = 0;  // of those
    RequestEnd end{};         // said at its release
    Retention retention{};    // of what it publishes
    uint32_t tenant = 0;
    bool is_chain_stopped = false;  // a hash lied: nothing of this table is published any more
    uint32_t num_asked = 0, num_cached = 0, num_committed = 0, num_published = 0;
    Hash key{};  // of block num_published - 1, or the root
    BlockId tail = kNullBlock;  // the partly filled block whose token ids the index has noted
    std::vector<std::vector<BlockId>> blocks;  // a group
    std::vector<uint32_t> first_live;          // a group: entries before are null
};

struct Copy {
    uint32_t group;
    BlockId source, target;
    bool operator==(const Copy &) const = default;
};

struct PendingCopy {
    Copy copy;
    uint32_t slot;  // of the table it was made for
};

// Blocks [first, first + num_blocks) of these tables (their places in the call) are the same.
struct SharedRun {
    uint32_t first, num_blocks;
    std::vector<uint32_t> members;
};

struct CoreCounters {
    uint64_t num_queries = 0, num_asked_tokens = 0, num_hit_tokens = 0;
    uint64_t num_resumes = 0, num_resumed_tokens = 0, num_mismatches = 0;
};

struct Failure {
    int invariant;
    std::string words;
};

class CacheCore {
    CoreConfig config_;
    EventLog log_;
    ChainHash chain_;
    std::vector<std::unique_ptr<BlockGroup>> groups_;
    std::vector<Table> tables_;
    std::vector<uint32_t> free_slots_;
    std::vector<PendingCopy> pending_copies_;
    CoreCounters counters_;
    uint32_t num_open_ = 0;
    uint64_t version_ = 0;

    Table &table(TableId id);
    TableId new_table();
    void publish_full_blocks(Table &table, const uint32_t *tokens);
    void give_back(Table &table);
    void close(uint32_t slot);
    Retention wanted_now(const Table &table) const;
    Retention wanted_of_new(const Table &table) const;
    void raise_path(const Table &table);
    uint32_t forget_key(const Hash &key);  // in all groups but the first
    uint32_t forget_blocks(const std::vector<BlockId> &blocks);
    void note_tail(Table &table, const uint32_t *tokens);
    void keep_tail(Table &table);
    bool must_copy(const Table &table, uint32_t group, uint32_t num_tokens) const;
    uint32_t num_missing(const Table &table, uint32_t group, uint32_t num_tokens) const;

    RadixIndex *tree() const;
    std::vector<Hash> match_full(const uint32_t *tokens, uint32_t max_blocks, const Hash *keys,
                                 Match &match);
    std::vector<Hash> match_tree(const uint32_t *tokens, uint32_t num_tokens, Match &match);
    uint32_t fit_window(uint32_t group, uint32_t num_blocks, const std::vector<Hash> &keys,
                        const uint32_t *tokens, Match &match) const;
    void keep_blocks(uint32_t num_blocks, const std::vector<Hash> &keys, const uint32_t *tokens,
                     Match &match) const;

    std::optional<Failure> check_counts() const;
    std::optional<Failure> check_references(const BlockGroup &group) const;
    std::optional<Failure> check_list(const BlockGroup &group) const;
    std::optional<Failure> check_index(const BlockGroup &group);
    std::optional<Failure> check_tree(const BlockGroup &group) const;
    std::optional<Failure> check_tables(const BlockGroup &group) const;

public:
    explicit CacheCore(const CoreConfig &config);
    CacheCore(const CacheCore &) = delete;  // its groups write to its log

    uint32_t block_size() const { return config_.block_size; }
    uint32_t num_groups() const { return uint32_t(groups_.size()); }
    BlockGroup &group(uint32_t index);
    EventLog &log() { return log_; }
    ChainHash &chain() { return chain_; }
    const CoreCounters &counters() const { return counters_; }
    uint32_t num_open_tables() const { return num_open_; }
    size_t num_pending_copies() const { return pending_copies_.size(); }

    // Never the last known token; changes nothing.
    // `keys`: the hashes of all full blocks, where the caller has them already.
    Match peek_match(const uint32_t *tokens, uint32_t num_tokens, const Hash &root,
                     const Hash *keys = nullptr);
    // The same match without its partly matched block.
    Match floor(const Match &match) const;
    // chunk_tokens 0: everything behind the match in one chunk.
    bool can_admit(const Match &match, uint32_t num_tokens, uint32_t reserve_blocks,
                   uint32_t chunk_tokens) const;

    // `tenant`: who pays for what the table publishes, where tenants have shares.
    TableId open(const Match &match, bool is_resumed, uint32_t tenant = 0);
    // False: not now, and nothing changed. Copies are appended.
    bool extend(TableId id, uint32_t num_tokens, std::vector<Copy> &copies);
    void release_copies(const std::vector<Copy> &copies);
    void commit(TableId id, const uint32_t *tokens, size_t num_known, uint32_t num_computed);
    void release(TableId id, const RequestEnd &end = {});
    TableId fork(TableId id);
    const Table &peek_table(TableId id) { return table(id); }

    // Time for the eviction policies; never back.
    void advance(uint64_t now_ns);
    // Every run of blocks that two or more of the tables share, the longest company first.
    std::vector<SharedRun> shared_runs(const std::vector<TableId> &ids, uint32_t group);
    // What the table publishes from now on is kept so, and what it holds at least so. A lifetime
    // is given as ttl_ns and starts now, at every block's publication, and again at every hit.
    void retain(TableId id, const Retention &wanted);
    uint32_t forget_prefix(const uint32_t *tokens, uint32_t n, const Hash &root);
    uint32_t forget_root(const Hash &root);
    // Evicts up to n blocks of a group; says how many: fewer only when no more are evictable.
    uint32_t evict(uint32_t group, uint32_t n);
    bool reset();
    // The first broken invariant. Level 0: counters; 1: lists and references; 2: the index as well.
    std::optional<Failure> check(int level);
};

}  // namespace pagemill::cache
