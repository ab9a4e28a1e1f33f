// The blocks that ReuseRank remembers, cached or not, and what their use was.
//
// The whole shadow of an LRU cache of C blocks is a list of the last C blocks that were used. The
// other shadow, of ReuseRank's own choice, marks the nodes that it holds. A block that was evicted
// is remembered until 4 C others were evicted after it.
//
// 1. A node is there while it is cached, remembered, or in one of the shadows.
// 2. A shadow is prefix-closed: its node's parent is in it as well.
#pragma once

#include <deque>
#include <vector>

#include "cache/eviction/key_map.hpp"

namespace pagemill::cache {

using NodeId = uint32_t;  // 0: none

struct ReuseNode {
    Key key = 0;
    NodeId parent = 0, newer = 0, older = 0;  // parent: while in the shadow; links: while in LRU
    uint32_t record = 0, num_uses = 0;        // record 0: not used yet
    BlockId block = kNullBlock;
    uint32_t num_shadow_children = 0, remembered = 0;  // the moment, or 0
    uint8_t block_class = 0;
    bool ends_request = false, is_in_lru = false, is_in_shadow = false;
};

class ReuseHistory {
    static constexpr size_t kRememberedShare = 4;
    const size_t capacity_;
    std::vector<ReuseNode> nodes_;  // [0]: the ends of the LRU list
    std::vector<NodeId> free_;
    KeyMap by_key_;
    std::deque<std::pair<NodeId, uint32_t>> evicted_;  // (node, moment): counts while both agree
    size_t num_in_lru_ = 0, num_remembered_ = 0;
    uint32_t clock_ = 0;

    void link_newest(NodeId id);
    void unlink(NodeId id);
    void forget_oldest();

public:
    explicit ReuseHistory(uint32_t capacity) : capacity_(capacity), nodes_(1) {}

    ReuseNode &operator[](NodeId id) { return nodes_[id]; }
    size_t num_nodes() const { return nodes_.size() - 1 - free_.size(); }

    // The node that this key has, or a new one; never one that stands for another block.
    NodeId node_for(Key key);
    // Used now: the newest of the LRU shadow. Returns what went from there, or 0.
    NodeId use(NodeId id);
    // Evicted now, from the cache or from the shadow.
    void remember(NodeId id);
    // Cached again.
    void recall(NodeId id);
};

}  // namespace pagemill::cache
