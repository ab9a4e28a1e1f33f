// Many requests through one cache, one after another, and what a clairvoyant would have hit.
#pragma once

#include "cache/cache_core.hpp"

namespace pagemill::cache {

// Request i has the token ids [start[i], start[i + 1]), comes at times_ns[i] (never back) and is
// over at once. It may be given one token more, so that a match can cover all of its ids.
struct Requests {
    std::span<const uint32_t> token_ids;
    std::span<const int64_t> start, times_ns;
    std::span<const uint8_t> has_tool_calls;
    bool add_last_token;

    size_t size() const { return times_ns.size(); }
    std::span<const uint32_t> ids(size_t i) const {
        return token_ids.subspan(size_t(start[i]), size_t(start[i + 1] - start[i]));
    }
};

inline constexpr int32_t kDoesNotFit = -1;

// Hit tokens of each request, or kDoesNotFit.
std::vector<int32_t> replay(CacheCore &core, const Requests &requests);

// Belady's MIN where every request must be admitted as a whole: hit blocks of each request in a
// cache of `capacity` blocks, one token id a block. A block's next use is never before its
// parent's, so what is kept is prefix-closed by itself.
std::vector<int32_t> clairvoyant_hits(const Requests &requests, uint32_t capacity);

// Runs of blocks of request `last` that stand side by side and were all used before by request
// `first`, and by none between. The last block of a request, perhaps partly filled, is one alone.
struct UseIntervals {
    std::vector<int32_t> first, last, position, num_blocks;  // position: of the first block
};

// Of requests from num_warmup on; a run has at most max_blocks.
UseIntervals use_intervals(const Requests &requests, size_t num_warmup, uint32_t max_blocks);

}  // namespace pagemill::cache
