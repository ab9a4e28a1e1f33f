// ARC (Megiddo and Modha, FAST 2003): blocks seen once and blocks seen again, each with the keys of
// those that went; a key that comes back moves the target between the two. Lists count all blocks,
// but only leaves leave them.
#include <algorithm>

#include "cache/eviction/ghosts.hpp"
#include "cache/eviction/leaf_heap.hpp"
#include "cache/eviction/policies.hpp"

namespace pagemill::cache {

namespace {

class Arc : public EvictionPolicy {
    struct Fact {
        Key key;
        uint64_t released;
        uint8_t is_again;
    };
    Zeroed<Fact> facts_;
    LeafHeap leaves_[2];
    Ghosts ghosts_[2];
    size_t num_blocks_[2] = {0, 0};
    double target_ = 0;  // for the number of blocks seen once
    double capacity_;
    uint64_t clock_ = 0;

    void adapt(int side) {
        double ours = double(ghosts_[side].size()), theirs = double(ghosts_[1 - side].size());
        double step = std::max(1.0, theirs / ours);
        target_ = std::clamp(side ? target_ - step : target_ + step, 0.0, capacity_);
    }
    void trim() {
        while (ghosts_[0].size() > 0 && double(num_blocks_[0] + ghosts_[0].size()) > capacity_)
            ghosts_[0].forget_oldest();
        while (ghosts_[1].size() > 0 && double(num_blocks_[0] + num_blocks_[1] +
                                               ghosts_[0].size() + ghosts_[1].size()) >
                                            2 * capacity_)
            ghosts_[1].forget_oldest();
    }

public:
    explicit Arc(const PolicyConfig &config)
        : facts_(config.num_blocks),
          leaves_{LeafHeap(config.num_blocks), LeafHeap(config.num_blocks)},
          capacity_(double(config.num_blocks) - 1) {}

    void published(BlockId block, Key key, uint32_t) override {
        int side = ghosts_[0].contains(key) ? 0 : ghosts_[1].contains(key) ? 1 : -1;
        if (side >= 0) {
            adapt(side);
            ghosts_[side].erase(key);
        }
        facts_[block] = {key, ++clock_, uint8_t(side >= 0)};
        ++num_blocks_[side >= 0];
        trim();
    }
    void used(BlockId block, Use use) override {
        if (use == Use::kReleased) {
            facts_[block].released = ++clock_;
            return;
        }
        --num_blocks_[facts_[block].is_again];
        facts_[block].is_again = 1;
        ++num_blocks_[1];
    }
    void dropped(BlockId block) override {
        --num_blocks_[facts_[block].is_again];
        ghosts_[facts_[block].is_again].insert(facts_[block].key);
        trim();
    }
    void moved(BlockId from, BlockId to) override { facts_[to] = facts_[from]; }
    void add(BlockId leaf) override {
        leaves_[facts_[leaf].is_again].push(leaf, 0, facts_[leaf].released);
    }
    void remove(BlockId leaf) override { leaves_[facts_[leaf].is_again].erase(leaf); }
    BlockId victim() override {
        int side = double(num_blocks_[0]) > target_ ? 0 : 1;
        BlockId leaf = leaves_[side].top();
        return leaf != kNullBlock ? leaf : leaves_[1 - side].top();
    }
};

}  // namespace

PolicyPointer make_arc(const PolicyConfig &config) { return std::make_unique<Arc>(config); }

}  // namespace pagemill::cache
