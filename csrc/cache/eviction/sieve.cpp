// SIEVE (Zhang et al., NSDI 2024): one queue in the order of publishing, one bit a block, a hand
// that goes from the oldest to the newest: it clears the bits it meets and takes the first block
// without one. It walks over leaves only.
#include <set>

#include "cache/eviction/policies.hpp"
#include "cache/zeroed.hpp"

namespace pagemill::cache {

namespace {

class Sieve : public EvictionPolicy {
    Zeroed<uint64_t> place_;
    Zeroed<uint8_t> is_visited_;
    std::set<std::pair<uint64_t, BlockId>> leaves_;
    uint64_t clock_ = 0, hand_ = 0;

public:
    explicit Sieve(const PolicyConfig &config)
        : place_(config.num_blocks), is_visited_(config.num_blocks) {}

    void published(BlockId block, Key, uint32_t) override {
        place_[block] = ++clock_;
        is_visited_[block] = 0;
    }
    void used(BlockId block, Use use) override {
        if (use == Use::kFound) is_visited_[block] = 1;
    }
    void moved(BlockId from, BlockId to) override {
        place_[to] = place_[from];
        is_visited_[to] = is_visited_[from];
    }
    void add(BlockId leaf) override { leaves_.emplace(place_[leaf], leaf); }
    void remove(BlockId leaf) override { leaves_.erase({place_[leaf], leaf}); }
    BlockId victim() override {
        if (leaves_.empty()) return kNullBlock;
        auto at = leaves_.lower_bound({hand_, kNullBlock});
        for (;; ++at) {  // two rounds at most: the first leaves no bit
            if (at == leaves_.end()) at = leaves_.begin();
            if (!is_visited_[at->second]) break;
            is_visited_[at->second] = 0;
        }
        hand_ = at->first;
        return at->second;
    }
};

}  // namespace

PolicyPointer make_sieve(const PolicyConfig &config) { return std::make_unique<Sieve>(config); }

}  // namespace pagemill::cache
