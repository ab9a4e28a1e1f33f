// What was published and evicted since the last look, in order.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/sha256.hpp"

namespace pagemill::cache {

struct Event {
    bool is_stored;  // else removed
    uint32_t group;
    Hash hash, parent;   // parent, position and tokens: of stored blocks
    uint32_t position;   // in its chain; 0: the parent is the root
    size_t first_token;  // of block_size tokens in EventLog::token_ids
};

struct EventLog {
    bool is_on = false;
    std::vector<Event> events;
    std::vector<uint32_t> token_ids;

    void stored(uint32_t group, const Hash &hash, const Hash &parent, uint32_t position,
                const uint32_t *tokens, uint32_t block_size) {
        if (!is_on) return;
        events.push_back({true, group, hash, parent, position, token_ids.size()});
        token_ids.insert(token_ids.end(), tokens, tokens + block_size);
    }
    void removed(uint32_t group, const Hash &hash) {
        if (is_on) events.push_back({false, group, hash, {}, 0, 0});
    }
    void clear() {
        events.clear();
        token_ids.clear();
    }
};

}  // namespace pagemill::cache
