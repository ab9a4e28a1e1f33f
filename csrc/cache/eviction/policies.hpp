// One line a policy: how it is made. Each has a file of its own.
#pragma once

#include "cache/eviction/policy.hpp"

namespace pagemill::cache {

using PolicyPointer = std::unique_ptr<EvictionPolicy>;

PolicyPointer make_lru(const PolicyConfig &);
PolicyPointer make_lfu(const PolicyConfig &);
PolicyPointer make_fifo(const PolicyConfig &);
PolicyPointer make_sieve(const PolicyConfig &);
PolicyPointer make_s3fifo(const PolicyConfig &);
PolicyPointer make_arc(const PolicyConfig &);
PolicyPointer make_gdsf(const PolicyConfig &);
PolicyPointer make_reuse_rank(const PolicyConfig &);
PolicyPointer make_reuse_rank_strict(const PolicyConfig &);
PolicyPointer make_reuse_rank_plain(const PolicyConfig &);
PolicyPointer make_tlru(const PolicyConfig &);
PolicyPointer make_lhd(const PolicyConfig &);

}  // namespace pagemill::cache
