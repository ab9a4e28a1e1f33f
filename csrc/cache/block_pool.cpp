#include "cache/block_pool.hpp"

#include "cache/bug.hpp"

namespace pagemill::cache {

static constexpr uint32_t kMarked = uint32_t(1) << 31;

BlockPool::BlockPool(uint32_t num_blocks)
    : num_blocks_(num_blocks),
      num_empty_(num_blocks - 1),
      ref_count_(num_blocks),
      next_(num_blocks),
      prev_(num_blocks),
      empty_(num_blocks),
      empty_quads_(num_blocks / 4 + 1) {
    for (BlockId block = 1; block < num_blocks; ++block) empty_.insert(block);
    for (uint32_t quad = 1; quad < num_blocks / 4; ++quad) empty_quads_.insert(quad);
}

size_t BlockPool::num_bytes() const {
    return ref_count_.num_bytes() + next_.num_bytes() + prev_.num_bytes() + empty_.num_bytes() +
           empty_quads_.num_bytes();
}

void BlockPool::link_before(BlockId position, BlockId block) {
    BlockId before = prev_[position];
    next_[before] = block;
    prev_[block] = before;
    next_[block] = position;
    prev_[position] = block;
}

void BlockPool::unlink(BlockId block) {
    next_[prev_[block]] = next_[block];
    prev_[next_[block]] = prev_[block];
    start_ring(block);
}

BlockId BlockPool::allocate(BlockId previous) {
    if (num_empty_ == 0) bug("allocate: no block is empty");
    BlockId block = previous + 1;
    if (previous == kNullBlock || block >= num_blocks_ || !empty_.contains(block)) {
        uint32_t quad = empty_quads_.smallest();
        block = quad != BitTree::kNone ? quad * 4 : empty_.smallest();
    }
    empty_.erase(block);
    empty_quads_.erase(block / 4);
    --num_empty_;
    ref_count_[block] = 1;
    start_ring(block);
    return block;
}

void BlockPool::take_reference(BlockId block) {
    if (ref_count_[block]++ != 0) return;
    unlink(block);
    --num_evictable_;
}

void BlockPool::check_release(std::span<const BlockId> blocks) {
    const char *wrong = nullptr;
    size_t seen = 0;
    for (; seen < blocks.size() && !wrong; ++seen) {
        BlockId block = blocks[seen];
        if (block == kNullBlock) continue;
        uint32_t count = block < num_blocks_ ? ref_count_[block] : 0;
        if (count == 0) wrong = " is not held";
        else if (count & kMarked) wrong = " stands twice in one release";
        else ref_count_[block] = count | kMarked;
        if (wrong) break;
    }
    for (size_t i = 0; i < seen; ++i)
        if (blocks[i] != kNullBlock) ref_count_[blocks[i]] &= ~kMarked;
    if (wrong) bug("release: block " + std::to_string(blocks[seen]) + wrong);
}

void BlockPool::make_evictable(BlockId block) {
    link_before(kNullBlock, block);
    ++num_evictable_;
}

void BlockPool::make_empty(BlockId block, bool was_evictable) {
    if (was_evictable) {
        unlink(block);
        --num_evictable_;
    }
    empty_.insert(block);
    if (empty_.quad(block) == 15) empty_quads_.insert(block / 4);
    ++num_empty_;
}

void BlockPool::swap_positions(BlockId a, BlockId b) {
    if (next_[b] == a) std::swap(a, b);
    BlockId after_a = next_[a];
    unlink(a);
    if (after_a == b) {
        link_before(next_[b], a);
        return;
    }
    link_before(b, a);
    unlink(b);
    link_before(after_a, b);
}

}  // namespace pagemill::cache
