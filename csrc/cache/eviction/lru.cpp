// Least recently used first. While all blocks have one band and no block a lifetime, the pool's own
// list is this order and the block group asks that; this is the same order within a band.
#include "cache/eviction/policies.hpp"
#include "cache/eviction/ranked.hpp"

namespace pagemill::cache {

namespace {
struct Lru : RankedPolicy {
    using RankedPolicy::RankedPolicy;
    double rank(const Fact &) const override { return 0; }
};
}  // namespace

PolicyPointer make_lru(const PolicyConfig &config) { return std::make_unique<Lru>(config); }

}  // namespace pagemill::cache
