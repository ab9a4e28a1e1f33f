// T-LRU, tail-optimised LRU (arXiv 2510.15152, as in SGLang): a conversation of L tokens whose next
// prompt adds Q needs only L + Q - X of them cached to keep its next prefill within X tokens. What
// lies behind goes first, then all in order of use. For comparison.
#include "cache/eviction/policies.hpp"
#include "cache/eviction/ranked.hpp"

namespace pagemill::cache {

namespace {

class TailLru : public RankedPolicy {
    static constexpr double kPrefillTokens = 2048, kNextPromptTokens = 512;  // X and Q
    const double block_tokens_;

    // value: blocks of the conversation when it was last used.
    double rank(const Fact &fact) const override {
        double needed = fact.value * block_tokens_ + kNextPromptTokens - kPrefillTokens;
        return (fact.position + 1) * block_tokens_ > needed ? 0 : 1;
    }

public:
    explicit TailLru(const PolicyConfig &config)
        : RankedPolicy(config), block_tokens_(config.block_tokens) {}

    void request_ended(std::span<const BlockId> path, const RequestEnd &) override {
        for (BlockId block : path) facts_[block].value = double(path.size());
    }
};

}  // namespace

PolicyPointer make_tlru(const PolicyConfig &config) { return std::make_unique<TailLru>(config); }

}  // namespace pagemill::cache
