// Greedy-Dual-Size-Frequency (Cherkasova 1998): value = age + uses x cost, the age being the value
// of the last victim. All blocks have one size; the cost is the prefill work of a block, linear
// part and attention: 1 + p / 30,000 at token p (the two are equal there in a model of 8 billion).
#include <algorithm>

#include "cache/eviction/policies.hpp"
#include "cache/eviction/ranked.hpp"

namespace pagemill::cache {

namespace {

constexpr double kEqualTokens = 30000;

class Gdsf : public RankedPolicy {
    double block_tokens_, age_ = 0;

    void value(BlockId block) {
        Fact &fact = facts_[block];
        fact.value = age_ + fact.num_uses * (1 + fact.position * block_tokens_ / kEqualTokens);
    }
    double rank(const Fact &fact) const override { return fact.value; }

public:
    explicit Gdsf(const PolicyConfig &config)
        : RankedPolicy(config), block_tokens_(config.block_tokens) {}

    void published(BlockId block, Key key, uint32_t position) override {
        RankedPolicy::published(block, key, position);
        value(block);
    }
    void used(BlockId block, Use use) override {
        RankedPolicy::used(block, use);
        if (use == Use::kFound) value(block);
    }
    BlockId victim() override {
        BlockId leaf = leaves_.top();
        if (leaf != kNullBlock) age_ = std::max(age_, leaves_.top_rank());
        return leaf;
    }
};

}  // namespace

PolicyPointer make_gdsf(const PolicyConfig &config) { return std::make_unique<Gdsf>(config); }

}  // namespace pagemill::cache
