// First published, first evicted, as far as leaves allow.
#include "cache/eviction/policies.hpp"
#include "cache/eviction/ranked.hpp"

namespace pagemill::cache {

namespace {
struct Fifo : RankedPolicy {
    using RankedPolicy::RankedPolicy;
    double rank(const Fact &) const override { return 0; }
    uint64_t tie(const Fact &fact) const override { return fact.published; }
};
}  // namespace

PolicyPointer make_fifo(const PolicyConfig &config) { return std::make_unique<Fifo>(config); }

}  // namespace pagemill::cache
