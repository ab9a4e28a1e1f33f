// The integrity check must see each invariant broken: every test here breaks one, by hand.
#include "cache/bug.hpp"
#include "cache/cache_core.hpp"
#include "tests/check.hpp"

using namespace pagemill::cache;

namespace {

// Two prompts of three full blocks: one held by an open table, one only cached.
struct Scene {
    CacheCore core{{{20}, {0}, 16, true, false, false}};
    std::vector<uint32_t> held = ids(0), cached = ids(1000);
    TableId table;

    static std::vector<uint32_t> ids(uint32_t first) {
        std::vector<uint32_t> out(48);
        for (uint32_t i = 0; i < 48; ++i) out[i] = first + i;
        return out;
    }
    TableId run(const std::vector<uint32_t> &tokens, uint32_t num_slots) {
        std::vector<Copy> copies;
        TableId id = core.open(core.peek_match(tokens.data(), 0, Hash{}), false);
        CHECK(core.extend(id, num_slots, copies));
        core.commit(id, tokens.data(), 48, 48);
        return id;
    }
    Scene() {
        core.release(run(cached, 48));
        table = run(held, 60);
        CHECK(!core.check(2));
    }
    BlockPool &pool() { return core.group(0).pool; }
    FlatIndex &index() { return core.group(0).index; }
    BlockId held_block(size_t j) { return core.peek_table(table).blocks[0][j]; }
    BlockId cached_block(size_t j) {
        BlockId block = pool().oldest();  // tail first
        for (; j < 2; ++j) block = pool().next(block);
        return block;
    }
    int broken(int level = 2) {
        auto failure = core.check(level);
        return failure ? failure->invariant : 0;
    }
};

}  // namespace

TEST(check_sees_lost_and_doubly_free_blocks) {
    Scene lost, doubly, held;
    lost.pool().allocate(kNullBlock);
    CHECK(lost.broken() == 2);
    doubly.pool().make_empty(doubly.cached_block(2), false);
    CHECK(doubly.broken(1) == 1);
    held.core.release(held.table);
    held.pool().allocate(kNullBlock);
    CHECK(held.broken(0) == 1);
}

TEST(check_sees_wrong_reference_counts) {
    Scene more, fewer;
    more.pool().take_reference(more.held_block(0));
    CHECK(more.broken(1) == 2 && more.broken(0) == 0);
    fewer.pool().drop_reference(fewer.held_block(0));
    CHECK(fewer.broken(1) == 2);
}

TEST(check_sees_a_missing_parent) {
    Scene gone, older;
    BlockId parent = gone.cached_block(0);
    gone.index().drop(parent);
    gone.pool().make_empty(parent, true);
    CHECK(gone.broken(1) == 0 && gone.broken(2) == 3);
    older.pool().swap_positions(older.cached_block(0), older.cached_block(1));
    CHECK(older.broken(1) == 0 && older.broken(2) == 3);
}

TEST(check_sees_a_block_that_is_published_and_will_be_written) {
    Scene scene;
    scene.index().publish(scene.held_block(3), Hash{1}, Hash{}, scene.held.data(), true);
    CHECK(scene.broken(1) == 4);
}

TEST(check_sees_entries_that_lie) {
    Scene unpublished, content, unfindable;
    unpublished.index().drop(unpublished.held_block(2));
    CHECK(unpublished.broken(1) == 5);
    BlockId tail = content.cached_block(2);
    Hash hash = content.index().hash(tail), parent = content.index().parent(tail);
    content.index().drop(tail);
    content.index().publish(tail, hash, parent, content.held.data(), false);
    CHECK(content.broken(1) == 0 && content.broken(2) == 5);
    // Two blocks under one hash: only one of them can be found.
    hash = unfindable.index().hash(unfindable.cached_block(2));
    tail = unfindable.cached_block(1);
    unfindable.index().drop(tail);
    unfindable.index().publish(tail, hash, Hash{}, unfindable.held.data(), false);
    CHECK(unfindable.broken(1) == 0 && unfindable.broken(2) == 5);
}

TEST(check_sees_a_list_that_holds_a_held_block) {
    Scene scene;
    scene.pool().make_evictable(scene.held_block(0));
    CHECK(scene.broken(1) == 1);
}

TEST(a_wrong_release_changes_nothing) {
    Scene scene;
    BlockId block = scene.held_block(0);
    scene.pool().take_reference(block);  // as if another table held it
    BlockId twice[] = {block, block};
    CHECK(pagemill::tests::throws<Bug>([&] { scene.core.group(0).release_all(twice); }));
    scene.pool().drop_reference(block);
    CHECK(scene.broken() == 0);
    CHECK(pagemill::tests::throws<Bug>([&] { scene.core.group(1); }));
}
