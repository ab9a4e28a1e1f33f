#include <algorithm>
#include <set>

#include "cache/block_pool.hpp"
#include "cache/bug.hpp"
#include "tests/check.hpp"

using namespace pagemill::cache;
using pagemill::tests::throws;

TEST(bit_tree_is_a_set) {
    for (uint32_t size : {1u, 63u, 64u, 65u, 4096u, 4097u, 300000u}) {
        BitTree tree(size);
        std::set<uint32_t> set;
        uint32_t random = 12345;
        for (int step = 0; step < 3000; ++step) {
            random = random * 1664525 + 1013904223;
            uint32_t i = (random >> 8) % size;
            if (random >> 31) tree.insert(i), set.insert(i);
            else tree.erase(i), set.erase(i);
            CHECK(tree.contains(i) == (set.count(i) > 0));
            CHECK(tree.smallest() == (set.empty() ? BitTree::kNone : *set.begin()));
        }
    }
}

TEST(pool_hands_out_neighbours) {
    BlockPool pool(64);
    BlockId a = pool.allocate(kNullBlock), b = pool.allocate(kNullBlock);
    CHECK(a % 4 == 0 && b % 4 == 0 && a != b);  // each opens an aligned run of its own
    for (int i = 0; i < 3; ++i) {               // and both grow in turn, side by side
        BlockId next_a = pool.allocate(a), next_b = pool.allocate(b);
        CHECK(next_a == a + 1 && next_b == b + 1);
        a = next_a, b = next_b;
    }
}

TEST(pool_gives_every_block_once_and_never_the_null_block) {
    for (uint32_t size : {2u, 3u, 4u, 5u, 8u, 67u}) {
        BlockPool pool(size);
        std::set<BlockId> seen;
        for (BlockId last = 0; pool.num_empty() > 0; seen.insert(last)) last = pool.allocate(last);
        CHECK(seen.size() == size - 1 && !seen.count(kNullBlock));
        CHECK(throws<Bug>([&] { pool.allocate(kNullBlock); }));
        for (BlockId block : seen) {
            CHECK(pool.drop_reference(block));
            pool.make_empty(block, false);
        }
        CHECK(pool.num_empty() == size - 1 && pool.num_held() == 0);
        if (size >= 8) CHECK(pool.allocate(kNullBlock) == 4);  // whole runs again
    }
}

TEST(double_release_is_loud_and_changes_nothing) {
    BlockPool pool(16);
    BlockId one = pool.allocate(kNullBlock), two = pool.allocate(one);
    pool.take_reference(two);
    for (BlockId twice : {one, two}) {
        BlockId blocks[] = {one, twice == one ? one : two, two};
        CHECK(throws<Bug>([&] { pool.check_release(blocks); }));
        CHECK(pool.ref_count(one) == 1 && pool.ref_count(two) == 2 && pool.num_held() == 2);
    }
    BlockId never_held[] = {one, 9}, beyond[] = {99}, good[] = {kNullBlock, one, two, kNullBlock};
    CHECK(throws<Bug>([&] { pool.check_release(never_held); }));
    CHECK(throws<Bug>([&] { pool.check_release(beyond); }));
    pool.check_release(good);
    CHECK(pool.ref_count(one) == 1 && pool.ref_count(two) == 2);
}

static std::vector<BlockId> order(const BlockPool &pool) {
    std::vector<BlockId> out;
    for (BlockId b = pool.oldest(); b != kNullBlock; b = pool.next(b)) out.push_back(b);
    return out;
}

TEST(evictable_list_keeps_order_and_swaps_places) {
    BlockPool pool(16);
    std::vector<BlockId> blocks;
    for (int i = 0; i < 5; ++i) {
        blocks.push_back(pool.allocate(blocks.empty() ? kNullBlock : blocks.back()));
        pool.drop_reference(blocks.back());
        pool.make_evictable(blocks.back());
    }
    CHECK(order(pool) == blocks);
    for (size_t i = 0; i < 5; ++i)
        for (size_t j = 0; j < 5; ++j) {
            if (i == j) continue;
            pool.swap_positions(blocks[i], blocks[j]);
            std::swap(blocks[i], blocks[j]);
            CHECK(order(pool) == blocks);
        }
    pool.take_reference(blocks[2]);
    blocks.erase(blocks.begin() + 2);
    CHECK(order(pool) == blocks && pool.num_evictable() == 4);
}
