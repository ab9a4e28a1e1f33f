#include <map>

#include "cache/cache_core.hpp"
#include "tests/check.hpp"

using namespace pagemill::cache;

// All hashes share their first bytes, so that probes collide and removals shift.
static Hash crowded(uint32_t i) {
    Hash hash{};
    hash[0] = uint8_t(i % 3);
    hash[8] = uint8_t(i);
    hash[9] = uint8_t(i >> 8);
    return hash;
}

TEST(flat_index_is_a_map_under_collisions) {
    constexpr uint32_t kBlocks = 200;
    FlatIndex index(kBlocks, 16);
    std::map<uint32_t, BlockId> model;
    std::vector<uint32_t> tokens(16, 7);
    uint32_t random = 99;
    for (int step = 0; step < 20000; ++step) {
        random = random * 1664525 + 1013904223;
        uint32_t block = 1 + (random >> 8) % (kBlocks - 1);
        if (!index.is_published(block)) {
            index.publish(block, crowded(block), Hash{}, tokens.data(), false);
            model[block] = block;
        } else {
            index.drop(block);
            model.erase(block);
        }
        uint32_t other = 1 + (random >> 16) % (kBlocks - 1);
        CHECK(index.find(crowded(other)) == (model.count(other) ? other : kNullBlock));
    }
    CHECK(index.num_published() == model.size() && index.num_slots_in_use() == model.size());
    for (const auto &[hash, block] : model) CHECK(index.find(crowded(hash)) == block);
}

TEST(an_entry_moves_with_all_it_says) {
    FlatIndex index(8, 16);
    std::vector<uint32_t> tokens(16, 5), others(16, 6);
    index.publish(3, crowded(1), crowded(2), tokens.data(), true);
    index.move(3, 4);
    CHECK(!index.is_published(3) && index.is_first(4) && index.find(crowded(1)) == 4);
    CHECK(index.is_same(4, crowded(2), tokens.data()));
    CHECK(!index.is_same(4, crowded(2), others.data()) && !index.is_same(4, Hash{}, tokens.data()));
}

TEST(core_runs_a_sequence_and_finds_it_again) {
    CacheCore core({{12, 12}, {0, 20}, 16, true, false, true});
    std::vector<uint32_t> tokens(100);
    for (uint32_t i = 0; i < 100; ++i) tokens[i] = i;
    std::vector<Copy> copies;
    TableId table = core.open(core.peek_match(tokens.data(), 100, Hash{}), false);
    CHECK(core.extend(table, 100, copies) && copies.empty());
    core.commit(table, tokens.data(), 100, 100);
    CHECK(core.peek_table(table).blocks[1][4] == kNullBlock);  // token 81 is the first still read
    CHECK(core.peek_table(table).blocks[1][5] != kNullBlock);
    TableId twin = core.fork(table);
    CHECK(core.extend(twin, 101, copies) && copies.size() == 2);
    CHECK(!core.check(2));
    core.release(table);
    core.release_copies(copies);
    core.release(twin);
    CHECK(!core.check(2));
    CHECK(core.peek_match(tokens.data(), 100, Hash{}).num_tokens == 96);
    CHECK(core.peek_match(tokens.data(), 96, Hash{}).num_tokens == 80);
    CHECK(core.reset() && core.peek_match(tokens.data(), 100, Hash{}).num_tokens == 0);
    CHECK(!core.check(2));
}
