// S3-FIFO (Yang et al., SOSP 2023): a small queue of a tenth of the blocks, a main queue, and as
// many ghosts as the main queue holds. A block used again in the small queue goes on to the main
// one; a used one at the main queue's end goes round once more for each use, at most three. A block
// whose ghost is there starts in the main queue. Queues count all blocks, but only leaves leave.
#include <algorithm>
#include <set>

#include "cache/eviction/ghosts.hpp"
#include "cache/eviction/policies.hpp"
#include "cache/zeroed.hpp"

namespace pagemill::cache {

namespace {

class S3Fifo : public EvictionPolicy {
    struct Fact {
        Key key;
        uint64_t place;
        uint8_t num_uses, is_main;
    };
    using Leaves = std::set<std::pair<uint64_t, BlockId>>;
    Zeroed<Fact> facts_;
    Leaves leaves_[2];  // small, main
    size_t num_blocks_[2] = {0, 0}, small_size_;
    Ghosts ghosts_;
    uint64_t clock_ = 0;

    void enter(BlockId block, bool is_main) {
        Fact &fact = facts_[block];
        fact.is_main = is_main;
        fact.place = ++clock_;
        ++num_blocks_[is_main];
    }
    void leave(BlockId block) { --num_blocks_[facts_[block].is_main]; }
    void reenter(BlockId leaf, uint8_t num_uses) {
        remove(leaf);
        leave(leaf);
        enter(leaf, true);
        facts_[leaf].num_uses = num_uses;
        add(leaf);
    }

public:
    explicit S3Fifo(const PolicyConfig &config)
        : facts_(config.num_blocks), small_size_(std::max(1u, config.num_blocks / 10)) {}

    void published(BlockId block, Key key, uint32_t) override {
        bool is_known = ghosts_.contains(key);
        facts_[block] = {key, 0, 0, 0};
        if (is_known) ghosts_.erase(key);
        enter(block, is_known);
    }
    void used(BlockId block, Use use) override {
        if (use == Use::kFound && facts_[block].num_uses < 3) ++facts_[block].num_uses;
    }
    void dropped(BlockId block) override {
        leave(block);
        if (facts_[block].is_main) return;
        ghosts_.insert(facts_[block].key);
        while (ghosts_.size() > facts_.size() - small_size_) ghosts_.forget_oldest();
    }
    void moved(BlockId from, BlockId to) override { facts_[to] = facts_[from]; }
    void add(BlockId leaf) override {
        leaves_[facts_[leaf].is_main].emplace(facts_[leaf].place, leaf);
    }
    void remove(BlockId leaf) override {
        leaves_[facts_[leaf].is_main].erase({facts_[leaf].place, leaf});
    }
    BlockId victim() override {
        for (;;) {  // each turn takes a use away or moves a block on: it ends
            bool from_main = num_blocks_[0] <= small_size_ || leaves_[0].empty();
            if (leaves_[from_main].empty()) from_main = !from_main;
            if (leaves_[from_main].empty()) return kNullBlock;
            BlockId leaf = leaves_[from_main].begin()->second;
            uint8_t num_uses = facts_[leaf].num_uses;
            if (num_uses == 0) return leaf;
            reenter(leaf, from_main ? uint8_t(num_uses - 1) : uint8_t(0));
        }
    }
};

}  // namespace

PolicyPointer make_s3fifo(const PolicyConfig &config) { return std::make_unique<S3Fifo>(config); }

}  // namespace pagemill::cache
