// Least often used first, counted since the block was published; of equals the least recently used.
#include "cache/eviction/policies.hpp"
#include "cache/eviction/ranked.hpp"

namespace pagemill::cache {

namespace {
struct Lfu : RankedPolicy {
    using RankedPolicy::RankedPolicy;
    double rank(const Fact &fact) const override { return fact.num_uses; }
};
}  // namespace

PolicyPointer make_lfu(const PolicyConfig &config) { return std::make_unique<Lfu>(config); }

}  // namespace pagemill::cache
