// The Python face of csrc/cache. Token ids come as any contiguous buffer of 32-bit unsigned
// integers; tables go out as numpy int32 arrays. No Python object is made for a block.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bind_eviction.hpp"
#include "cache/bug.hpp"
#include "cache/cache_core.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace pagemill::cache;

namespace {

// Borrows the caller's token ids for the length of one call.
class Tokens {
    Py_buffer view_;

    [[noreturn]] static void refuse() {
        throw nb::type_error("token ids: a flat buffer of u32, as array('I') or numpy uint32");
    }

public:
    explicit Tokens(nb::handle object) {
        if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_ND | PyBUF_FORMAT) != 0) {
            PyErr_Clear();
            refuse();
        }
        const char *format = view_.format ? view_.format : "B";
        if (*format == '<' || *format == '=' || *format == '@') ++format;
        bool is_u32 = view_.itemsize == 4 && (*format == 'I' || *format == 'L') && !format[1];
        if (is_u32 && view_.ndim == 1 && view_.len / 4 <= INT32_MAX) return;
        PyBuffer_Release(&view_);
        refuse();
    }
    ~Tokens() { PyBuffer_Release(&view_); }
    Tokens(const Tokens &) = delete;
    Tokens &operator=(const Tokens &) = delete;
    const uint32_t *data() const { return static_cast<const uint32_t *>(view_.buf); }
    uint32_t size() const { return uint32_t(view_.len / 4); }
};

nb::bytes to_bytes(const Hash &hash) { return nb::bytes(hash.data(), hash.size()); }

Hash to_hash(const nb::bytes &bytes) {
    Hash hash;
    if (bytes.size() != hash.size()) bug("a namespace has 32 bytes: take it from namespace()");
    std::memcpy(hash.data(), bytes.c_str(), hash.size());
    return hash;
}

const uint8_t *bytes_data(const nb::bytes &bytes) {
    return reinterpret_cast<const uint8_t *>(bytes.c_str());
}

using Int32Array = nb::ndarray<nb::numpy, int32_t, nb::ndim<1>>;

Int32Array to_numpy(std::vector<int32_t> &&values) {
    auto *owned = new std::vector<int32_t>(std::move(values));
    nb::capsule owner(owned, [](void *pointer) noexcept {
        delete static_cast<std::vector<int32_t> *>(pointer);
    });
    return Int32Array(owned->data(), {owned->size()}, owner);
}

// The blocks of many tables in one group, one after another, and where each begins.
std::pair<Int32Array, Int32Array> block_tables(CacheCore &core, const std::vector<TableId> &ids,
                                               uint32_t group) {
    core.group(group);
    std::vector<int32_t> indptr(ids.size() + 1, 0);
    for (size_t i = 0; i < ids.size(); ++i)
        indptr[i + 1] = indptr[i] + int32_t(core.peek_table(ids[i]).blocks[group].size());
    std::vector<int32_t> block_ids(size_t(indptr.back()));
    for (size_t i = 0; i < ids.size(); ++i) {
        const auto &blocks = core.peek_table(ids[i]).blocks[group];
        if (!blocks.empty())
            std::memcpy(block_ids.data() + indptr[i], blocks.data(), 4 * blocks.size());
    }
    return {to_numpy(std::move(block_ids)), to_numpy(std::move(indptr))};
}

nb::object copies_or_none(CacheCore &core, TableId table, uint32_t num_tokens) {
    std::vector<Copy> copies;
    if (!core.extend(table, num_tokens, copies)) return nb::none();
    if (copies.empty()) return nb::steal(PyTuple_New(0));  // one shared object: no allocation
    nb::list out;
    for (const Copy &copy : copies)
        out.append(nb::make_tuple(copy.group, copy.source, copy.target));
    return nb::tuple(out);
}

// Tables in order, as far as there are slots; (how many, the copies).
nb::tuple extend_all(CacheCore &core, const std::vector<TableId> &tables,
                     const std::vector<uint32_t> &num_tokens) {
    if (tables.size() != num_tokens.size()) bug("extend_all: one length for each table");
    std::vector<Copy> copies;
    size_t num_done = 0;
    while (num_done < tables.size() && core.extend(tables[num_done], num_tokens[num_done], copies))
        ++num_done;
    nb::list out;
    for (const Copy &copy : copies)
        out.append(nb::make_tuple(copy.group, copy.source, copy.target));
    return nb::make_tuple(num_done, out);
}

void commit_all(CacheCore &core, const std::vector<TableId> &tables, const nb::list &token_ids,
                const std::vector<uint32_t> &num_computed) {
    if (tables.size() != token_ids.size() || tables.size() != num_computed.size())
        bug("commit_all: token ids and a length for each table");
    for (size_t i = 0; i < tables.size(); ++i) {
        Tokens tokens(token_ids[i]);
        core.commit(tables[i], tokens.data(), tokens.size(), num_computed[i]);
    }
}

void release_copies(CacheCore &core, const std::vector<std::vector<uint32_t>> &copies) {
    std::vector<Copy> native;
    for (const auto &copy : copies) native.push_back({copy.at(0), copy.at(1), copy.at(2)});
    core.release_copies(native);
}

// (group, hash, parent, position, token ids), in order; a removed block has no parent, no tokens.
nb::list take_events(CacheCore &core, uint32_t block_size) {
    nb::list out;
    EventLog &log = core.log();
    for (const Event &event : log.events) {
        if (!event.is_stored) {
            out.append(nb::make_tuple(event.group, to_bytes(event.hash), nb::bytes("", 0), 0,
                                      nb::make_tuple()));
            continue;
        }
        nb::list tokens;
        for (uint32_t i = 0; i < block_size; ++i)
            tokens.append(log.token_ids[event.first_token + i]);
        out.append(nb::make_tuple(event.group, to_bytes(event.hash), to_bytes(event.parent),
                                  event.position, nb::tuple(tokens)));
    }
    log.clear();
    return out;
}

nb::tuple group_counts(CacheCore &core, uint32_t index) {
    const BlockGroup &group = core.group(index);
    return nb::make_tuple(group.pool.num_blocks(), group.pool.num_empty(),
                          group.pool.num_evictable(), group.pool.num_held(),
                          group.index.num_published(), group.counters.num_stored,
                          group.counters.num_evicted, group.counters.num_duplicates,
                          group.counters.num_copies);
}

nb::tuple core_counts(CacheCore &core) {
    const CoreCounters &counters = core.counters();
    return nb::make_tuple(counters.num_queries, counters.num_asked_tokens, counters.num_hit_tokens,
                          counters.num_resumes, counters.num_resumed_tokens,
                          counters.num_mismatches, core.num_open_tables(),
                          core.num_pending_copies());
}

nb::object check(CacheCore &core, int level) {
    std::optional<Failure> failure = core.check(level);
    if (!failure) return nb::none();
    return nb::make_tuple(failure->invariant, failure->words);
}

// ---- hooks that only tests call ---------------------------------------------------------------

void swap_cached_blocks(CacheCore &core, uint32_t index, BlockId a, BlockId b) {
    BlockGroup &group = core.group(index);
    for (BlockId block : {a, b})
        if (block >= group.pool.num_blocks() || !group.index.is_published(block) ||
            group.pool.ref_count(block) > 0)
            bug("swap: block " + std::to_string(block) + " is not evictable");
    if (a == b) bug("swap: a block with itself");
    // What the order knows of each stays with the block: it must be the same of both.
    if (group.order.is_on() && group.order.num_children(a) != group.order.num_children(b))
        bug("swap: two blocks with as many children, or plain LRU");
    group.index.swap(a, b);
    if (group.tree) group.tree->swap(a, b);
    group.pool.swap_positions(a, b);
}

std::vector<BlockId> evictable_blocks(CacheCore &core, uint32_t index) {
    const BlockPool &pool = core.group(index).pool;
    std::vector<BlockId> out;
    for (BlockId block = pool.oldest(); block != kNullBlock; block = pool.next(block))
        out.push_back(block);
    return out;
}

void bind_hashes(nb::module_ &m) {
    m.def("hmac_sha256", [](const nb::bytes &key, const nb::bytes &message) {
        return to_bytes(sha256::hmac(bytes_data(key), key.size(), bytes_data(message),
                                     message.size()));
    }, "key"_a, "message"_a);
    m.def("chain_hash", [](const nb::bytes &parent, nb::handle token_ids, uint32_t block_size) {
        if (block_size == 0) bug("chain_hash: a block has at least one token");
        Tokens tokens(token_ids);
        ChainHash chain(block_size);
        Hash key = to_hash(parent);
        std::vector<uint8_t> out(tokens.size() / block_size * key.size());
        for (size_t j = 0; j < tokens.size() / block_size; ++j) {
            key = chain(key, tokens.data() + j * block_size);
            std::memcpy(out.data() + j * key.size(), key.data(), key.size());
        }
        return nb::bytes(out.data(), out.size());
    }, "parent"_a, "token_ids"_a, "block_size"_a);
    m.def("has_sha_instructions", &sha256::has_instructions);
}

void bind_match(nb::module_ &m) {
    nb::class_<Match>(m, "Match")
        .def_prop_ro("num_tokens", [](const Match &match) { return match.num_tokens; })
        .def_prop_ro("root", [](const Match &match) { return to_bytes(match.root); })
        .def_prop_ro("key", [](const Match &match) { return to_bytes(match.key); })
        .def("block_ids", [](const Match &match, size_t group) { return match.blocks.at(group); },
             "group"_a);
}

void bind_core(nb::module_ &m) {
    nb::class_<CacheCore> core_class(m, "CacheCore");
    core_class
        .def("__init__", [](CacheCore *self, std::vector<uint32_t> num_blocks,
                            std::vector<uint32_t> windows, uint32_t block_size, bool has_index,
                            bool has_tree, bool has_events, std::string eviction,
                            uint32_t policy_tokens) {
            new (self) CacheCore({std::move(num_blocks), std::move(windows), block_size, has_index,
                                  has_tree, has_events, std::move(eviction), policy_tokens});
        }, "num_blocks"_a, "windows"_a, "block_size"_a, "has_index"_a, "has_tree"_a,
            "has_events"_a, "eviction"_a = "lru", "policy_tokens"_a = 0)
        .def("peek_match", [](CacheCore &core, nb::handle token_ids, const nb::bytes &root,
                              const nb::bytes &keys) {
            Tokens tokens(token_ids);
            bool has_keys = keys.size() > 0;
            if (has_keys && keys.size() / sizeof(Hash) < tokens.size() / core.block_size())
                bug("peek_match: one key for each full block");
            const Hash *known = has_keys ? reinterpret_cast<const Hash *>(keys.c_str()) : nullptr;
            return core.peek_match(tokens.data(), tokens.size(), to_hash(root), known);
        }, "token_ids"_a, "root"_a, "keys"_a = nb::bytes("", 0))
        .def("retain", [](CacheCore &core, TableId table, int band, uint64_t ttl_ns,
                          uint32_t pin_tenant) {
            if (band < 0 || band >= Retention::kNumBands) bug("retain: a band is 0 to 100");
            core.retain(table, {uint8_t(band), 0, pin_tenant, ttl_ns});
        }, "table"_a, "band"_a, "ttl_ns"_a, "pin_tenant"_a)
        .def("set_shares", [](CacheCore &core, uint32_t group, uint32_t quota, bool is_fair) {
            core.group(group).order.set_shares(quota, is_fair);
        }, "group"_a, "quota_blocks"_a, "is_fair"_a)
        .def("forget_prefix", [](CacheCore &core, nb::handle token_ids, const nb::bytes &root) {
            Tokens tokens(token_ids);
            return core.forget_prefix(tokens.data(), tokens.size(), to_hash(root));
        }, "token_ids"_a, "root"_a)
        .def("forget_root", [](CacheCore &core, const nb::bytes &root) {
            return core.forget_root(to_hash(root));
        }, "root"_a)
        .def("shared_runs", [](CacheCore &core, const std::vector<TableId> &tables,
                               uint32_t group) {
            nb::list out;
            for (const SharedRun &run : core.shared_runs(tables, group))
                out.append(nb::make_tuple(run.first, run.num_blocks, run.members));
            return out;
        }, "tables"_a, "group"_a)
        .def("extend_all", &extend_all, "tables"_a, "num_tokens"_a)
        .def("commit_all", &commit_all, "tables"_a, "token_ids"_a, "num_computed_tokens"_a)
        .def("floor", &CacheCore::floor, "match"_a)
        .def("can_admit", &CacheCore::can_admit, "match"_a, "num_tokens"_a, "reserve_blocks"_a,
             "chunk_tokens"_a)
        .def("open", &CacheCore::open, "match"_a, "is_resumed"_a, "tenant"_a = 0)
        .def("extend", &copies_or_none, "table"_a, "num_tokens"_a)
        .def("release_copies", &release_copies, "copies"_a)
        .def("commit", [](CacheCore &core, TableId table, nb::handle token_ids,
                          uint32_t num_computed_tokens) {
            Tokens tokens(token_ids);
            core.commit(table, tokens.data(), tokens.size(), num_computed_tokens);
        }, "table"_a, "token_ids"_a, "num_computed_tokens"_a)
        .def("release", [](CacheCore &core, TableId table, bool is_finished, bool has_tool_calls) {
            core.release(table, {is_finished, has_tool_calls});
        }, "table"_a, "is_finished"_a = true, "has_tool_calls"_a = false)
        .def("fork", &CacheCore::fork, "table"_a)
        .def("num_cached", [](CacheCore &core, TableId table) {
            return core.peek_table(table).num_cached;
        }, "table"_a)
        .def("num_table_blocks", [](CacheCore &core, TableId table, uint32_t group) {
            core.group(group);
            return core.peek_table(table).blocks[group].size();
        }, "table"_a, "group"_a)
        .def("block_tables", &block_tables, "tables"_a, "group"_a)
        .def("evict", [](CacheCore &core, uint32_t group, uint32_t num_blocks) {
            return core.evict(group, num_blocks);
        }, "group"_a, "num_blocks"_a)
        .def("reset", &CacheCore::reset)
        .def("take_events", &take_events, "block_size"_a)
        .def("group_counts", &group_counts, "group"_a)
        .def("core_counts", &core_counts)
        .def("num_bytes", [](CacheCore &core, uint32_t group) {
            const BlockGroup &found = core.group(group);
            size_t tree_bytes = found.tree ? found.tree->num_bytes() : 0;
            return nb::make_tuple(found.pool.num_bytes(), found.index.num_bytes() + tree_bytes);
        }, "group"_a)
        .def("check", &check, "level"_a)
        .def("swap_cached_blocks", &swap_cached_blocks, "group"_a, "a"_a, "b"_a)
        .def("evictable_blocks", &evictable_blocks, "group"_a)
        .def("keep_hash_bytes", [](CacheCore &core, uint32_t n) { core.chain().keep_bytes(n); },
             "num_bytes"_a);
    bind_eviction(m, core_class);
}

}  // namespace

void bind_cache(nb::module_ &m) {
    nb::register_exception_translator([](const std::exception_ptr &pointer, void *) {
        try {
            std::rethrow_exception(pointer);
        } catch (const Bug &error) {
            PyErr_SetString(PyExc_AssertionError, error.what());
        }
    });
    bind_hashes(m);
    bind_match(m);
    bind_core(m);
}
