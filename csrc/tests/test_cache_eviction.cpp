// Every policy under random calls, and the order of bands, lifetimes and pins. The hits that a
// policy should give are the business of tests/cache; here the cache must stay whole.
#include <algorithm>
#include <set>

#include "cache/bug.hpp"
#include "cache/eviction/callback.hpp"
#include "cache/eviction/leaf_cells.hpp"
#include "cache/eviction/key_map.hpp"
#include "cache/replay.hpp"
#include "tests/check.hpp"

using namespace pagemill::cache;
using pagemill::tests::throws;

namespace {

struct Random {
    uint64_t state;
    uint32_t operator()(uint32_t below) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return uint32_t(state >> 33) % below;
    }
};

// Tables that open, grow, fork, end and are cut short, with time between, and retention.
struct Player {
    Random random;
    CacheCore core;
    std::vector<TableId> tables;
    std::vector<Copy> copies;
    uint64_t now_ns = 0;

    Player(uint64_t seed, const CoreConfig &config) : random{seed}, core(config) {}

    void open() {
        std::vector<uint32_t> tokens(1 + random(120));
        uint32_t branch = random(100), kind = random(4);
        for (uint32_t i = 0; i < tokens.size(); ++i) tokens[i] = i < branch ? 1 : kind;
        uint32_t num = uint32_t(tokens.size());
        TableId id = core.open(core.peek_match(tokens.data(), num, Hash{}), random(5) == 0);
        if (core.extend(id, num, copies)) core.commit(id, tokens.data(), num, num);
        tables.push_back(id);
    }
    void end() {
        uint32_t picked = random(uint32_t(tables.size()));
        core.release(tables[picked], {random(4) > 0, random(2) > 0});
        tables.erase(tables.begin() + picked);
    }
    void retain() {
        BlockGroup &group = core.group(random(core.num_groups()));
        BlockId block = 1 + random(group.pool.num_blocks() - 1);
        if (!group.index.is_published(block)) return;
        uint64_t until = random(2) ? now_ns + random(2'000'000'000) : 0;
        group.order.set_retention(block, {uint8_t(random(101)), until, random(3)});
    }
    void play(bool with_retention) {
        now_ns += random(3) ? 0 : random(1'500'000'000);
        core.advance(now_ns);
        uint32_t choice = random(9);
        if (choice == 8 && with_retention) return retain();
        if (choice == 7) {
            core.evict(random(core.num_groups()), random(4));
        } else if (choice == 6 && !tables.empty() && tables.size() < 5) {
            TableId picked = tables[random(uint32_t(tables.size()))];
            if (core.peek_table(picked).num_copies == 0) tables.push_back(core.fork(picked));
        } else if (choice == 5) {
            core.release_copies(copies);
            copies.clear();
        } else if (choice < 3 && tables.size() < 5) {
            open();
        } else if (!tables.empty()) {
            end();
        }
    }
};

void play_policy(const std::string &name, bool with_retention) {
    const std::vector<std::vector<uint32_t>> windows = {{0}, {0, 20}, {33}, {0, 0}};
    for (uint64_t seed = 1; seed <= 12; ++seed) {
        const auto &window = windows[seed % windows.size()];
        std::vector<uint32_t> sizes(window.size(), uint32_t(8 + seed % 23));
        Player player(seed, {sizes, window, 16, true, seed % 2 == 0, true, name, 0});
        for (int step = 0; step < 400; ++step) {
            player.play(with_retention);
            auto failure = player.core.check(2);
            CHECK((failure ? name + ": " + failure->words : "") == "");
            player.core.log().clear();
        }
        for (TableId id : player.tables) player.core.release(id);
        player.core.release_copies(player.copies);
        CHECK(player.core.reset() && !player.core.check(2));
    }
}

// Three chains of two blocks, all evictable: 16-token blocks of the letters 1, 2 and 3.
struct Chains {
    CacheCore core{{{20}, {0}, 16, true, false, false, "lru", 0}};

    Chains() {
        for (uint32_t letter : {1, 2, 3}) use(letter);
    }
    void use(uint32_t letter) {
        std::vector<uint32_t> tokens(33, letter);
        std::vector<Copy> copies;
        TableId id = core.open(core.peek_match(tokens.data(), 33, Hash{}), false);
        CHECK(core.extend(id, 32, copies));
        core.commit(id, tokens.data(), 33, 32);
        core.release(id);
    }
    std::vector<BlockId> chain(uint32_t letter) {
        std::vector<uint32_t> tokens(33, letter);
        return core.peek_match(tokens.data(), 33, Hash{}).blocks[0];
    }
    size_t length(uint32_t letter) { return chain(letter).size(); }
    EvictionOrder &order() { return core.group(0).order; }
    void evict(uint32_t n) {
        CHECK(core.evict(0, n) == n);
        CHECK(!core.check(2));
    }
};

}  // namespace

TEST(every_policy_keeps_the_cache_whole) {
    for (const std::string &name : eviction_policies()) play_policy(name, false);
}

TEST(every_policy_keeps_the_cache_whole_under_retention) {
    for (const std::string &name : eviction_policies()) play_policy(name, true);
}

TEST(unknown_policies_are_refused) { CHECK(throws<Bug>([] { find_policy("best"); })); }

TEST(lower_bands_go_first) {
    Chains chains;
    chains.order().set_retention(chains.chain(1)[1], {50, 0, 0});
    CHECK(chains.order().retention(chains.chain(1)[0]).band == 50);  // the parent as well
    chains.evict(4);
    CHECK(chains.length(1) == 2 && chains.length(2) == 0 && chains.length(3) == 0);
    chains.order().set_retention(chains.chain(1)[0], {10, 0, 0});  // never lowered
    CHECK(chains.order().retention(chains.chain(1)[0]).band == 50);
    chains.evict(2);
}

TEST(a_lifetime_keeps_a_block_while_it_runs) {
    Chains chains;
    chains.core.advance(1000);
    chains.order().set_retention(chains.chain(1)[1], {0, 5000, 0});
    chains.evict(1);
    CHECK(chains.length(1) == 2 && chains.length(2) == 1);
    chains.core.advance(5000);  // over: the least recently used again
    chains.evict(1);
    CHECK(chains.length(1) == 1 && chains.length(2) == 1);
    chains.order().set_retention(chains.chain(1)[0], {0, 9000, 0});
    chains.evict(4);  // nothing else is left at the end
    CHECK(chains.length(1) == 0);
}

TEST(pins_outlive_lifetimes_and_have_a_budget) {
    Chains chains;
    chains.order().set_pin_budget(3);
    chains.order().set_retention(chains.chain(1)[1], {0, 0, 7});
    chains.order().set_retention(chains.chain(2)[1], {0, UINT64_MAX, 0});
    CHECK(chains.order().retention(chains.chain(1)[0]).pin_tenant == 7);
    chains.evict(4);
    CHECK(chains.length(1) == 2 && chains.length(2) == 0 && chains.length(3) == 0);
    chains.use(4);
    chains.order().set_retention(chains.chain(4)[1], {0, 0, 7});  // the fourth pin of three
    CHECK(chains.order().num_dropped_pins() == 1);
    CHECK(chains.order().retention(chains.chain(1)[1]).pin_tenant == 0);
    chains.evict(1);
    CHECK(chains.length(1) == 1 && chains.length(4) == 2);
    chains.evict(3);  // a pin keeps nobody waiting
    CHECK(chains.core.group(0).pool.num_empty() == 19);
}

TEST(retention_is_checked) {
    Chains chains;
    CHECK(throws<Bug>([&] { chains.order().set_retention(chains.chain(1)[0], {101, 0, 0}); }));
    CHECK(throws<Bug>([&] { chains.order().set_retention(19, {0, 0, 0}); }));
    CHECK(throws<Bug>([&] { chains.order().set_policy(find_policy("lfu")); }));
}

TEST(a_policy_from_outside_is_asked_again_before_a_block_goes) {
    std::vector<double> worth(20, 0);
    std::set<BlockId> known;
    CacheCore core{{{5}, {0}, 1, true, false, false, "lru", 0}};
    core.group(0).order.set_policy([&](const PolicyConfig &config) {
        PolicyCallbacks calls;
        calls.touch = [&](BlockId block, Key, uint32_t, uint64_t, bool) { known.insert(block); };
        calls.rank = [&](BlockId block, uint64_t) { return worth[block]; };
        calls.drop = [&](BlockId block) { CHECK(known.erase(block) == 1); };
        return std::make_unique<CallbackPolicy>(config, calls);
    });
    std::vector<uint32_t> ids = {1, 2, 3, 4};
    std::vector<int64_t> start = {0, 1, 2, 3, 4}, times = {0, 1, 2, 3};
    std::vector<uint8_t> tools(4, 0);
    replay(core, {ids, start, times, tools, true});
    CHECK(known.size() == 4);
    uint32_t first[] = {1, 0};
    BlockId block = core.peek_match(first, 2, Hash{}).blocks[0].at(0);
    worth[block] = 1;  // grown since it became a leaf
    CHECK(core.evict(0, 3) == 3 && known.size() == 1 && known.count(block));
    CHECK(!core.check(2));
}

TEST(key_map_is_a_map) {
    KeyMap map;
    std::map<Key, uint32_t> reference;
    Random random{7};
    for (int step = 0; step < 20000; ++step) {
        Key key = random(97) * 64;  // many share a home slot
        if (random(2)) map.set(key, uint32_t(step + 1)), reference[key] = uint32_t(step + 1);
        else map.erase(key), reference.erase(key);
        CHECK(map.size() == reference.size());
        Key other = random(97) * 64;
        auto found = reference.find(other);
        CHECK(map.find(other) == (found == reference.end() ? 0 : found->second));
    }
}

TEST(a_clairvoyant_keeps_what_comes_back) {
    std::vector<uint32_t> ids = {0, 1, 2, 0, 3, 0, 1};
    std::vector<int64_t> start = {0, 1, 2, 3, 4, 5, 6, 7}, times(7, 0);
    std::vector<uint8_t> tools(7, 0);
    Requests requests{ids, start, times, tools, false};
    CHECK((clairvoyant_hits(requests, 2) == std::vector<int32_t>{0, 0, 0, 1, 0, 1, 0}));
    CHECK((clairvoyant_hits(requests, 3) == std::vector<int32_t>{0, 0, 0, 1, 0, 1, 1}));
}
