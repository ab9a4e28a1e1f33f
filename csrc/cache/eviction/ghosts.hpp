// Keys of blocks that went, a bounded number of them, the oldest forgotten first.
#pragma once

#include <deque>

#include "cache/eviction/key_map.hpp"

namespace pagemill::cache {

class Ghosts {
    KeyMap stamps_;
    std::deque<std::pair<Key, uint32_t>> order_;  // an entry counts while it carries the stamp
    uint32_t clock_ = 0;

    void drop_stale() {
        while (!order_.empty() && stamps_.find(order_.front().first) != order_.front().second)
            order_.pop_front();
    }

public:
    size_t size() const { return stamps_.size(); }
    bool contains(Key key) const { return stamps_.find(key) != 0; }
    void erase(Key key) { stamps_.erase(key); }
    void forget_oldest() {
        drop_stale();
        if (!order_.empty()) stamps_.erase(order_.front().first);
    }
    void insert(Key key) {
        if (++clock_ == 0) ++clock_;
        stamps_.set(key, clock_);
        order_.emplace_back(key, clock_);
        if (order_.size() > 2 * size() + 64)
            std::erase_if(order_, [this](const auto &entry) {
                return stamps_.find(entry.first) != entry.second;
            });
    }
};

}  // namespace pagemill::cache
