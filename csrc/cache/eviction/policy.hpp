// What chooses the next block to evict. A policy ranks; it neither holds nor frees anything: the
// block group tells it what happens to published blocks and asks for the next victim.
//
//     published --used, used, ...--> dropped               of a block that has a hash
//     add --remove--> add --> victim() --> dropped         of an evictable leaf
//
// 1. Only blocks that stand between add and remove are victims.
// 2. A leaf is evictable and has no published child (in a window group: it is evictable). So under
//    every policy the cached set stays prefix-closed and a run goes from its tail.
// 3. Time is read from the clock in the configuration; it never goes back. Nothing here draws lots.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cache/block_pool.hpp"

namespace pagemill::cache {

// The first eight bytes of a block's hash: it is known again after its eviction.
using Key = uint64_t;

struct PolicyConfig {
    uint32_t num_blocks;    // of the pool, with its null block
    uint32_t block_tokens;  // tokens of a block: what was learnt in tokens holds for any size
    const uint64_t *now_ns;
};

struct RequestEnd {
    bool is_finished = true;  // false: preempted, or cut short
    bool has_tool_calls = false;
    // filled in by the cache: full blocks that the prompt asked for, and those that it found
    uint32_t num_asked_blocks = 0, num_hit_blocks = 0;
};

enum class Use {
    kFound,     // a prompt found the block
    kReleased,  // its last holder let go of it; of a table the tail first
};

class EvictionPolicy {
public:
    virtual ~EvictionPolicy() = default;

    // The block is findable from now on; its place in its chain is `position`, in blocks.
    virtual void published(BlockId block, Key key, uint32_t position) = 0;
    virtual void used(BlockId /*block*/, Use /*use*/) {}
    virtual void dropped(BlockId /*block*/) {}
    // `to` now stands for `from`, which is no leaf.
    virtual void moved(BlockId from, BlockId to) = 0;

    virtual void add(BlockId leaf) = 0;
    virtual void remove(BlockId leaf) = 0;
    // The leaf to evict next, or kNullBlock when there is none.
    virtual BlockId victim() = 0;

    // Before its blocks are released. `path`: its published blocks in order.
    virtual void request_ended(std::span<const BlockId> /*path*/, const RequestEnd & /*end*/) {}
};

using MakePolicy = std::function<std::unique_ptr<EvictionPolicy>(const PolicyConfig &)>;

std::vector<std::string> eviction_policies();
// A Bug for an unknown name.
MakePolicy find_policy(const std::string &name);

}  // namespace pagemill::cache
