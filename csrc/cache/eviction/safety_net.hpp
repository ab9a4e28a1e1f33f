// Which of two policies to follow, from what their shadow caches would have hit.
//
// The lead of ReuseRank over LRU is summed in blocks and forgotten over two turnovers of an LRU
// cache of the pool's size. LRU is followed first. ReuseRank is followed from a lead of 0.5 % of
// the asked blocks on, and LRU again when that lead is gone.
#pragma once

#include <cmath>
#include <cstdint>

namespace pagemill::cache {

class SafetyNet {
    static constexpr double kTurnovers = 2, kEnterShare = 0.005;
    double capacity_, lead_ = 0, asked_ = 0, missed_ = 0;
    bool is_following_ = false;  // ReuseRank
    uint64_t num_switches_ = 0;

public:
    explicit SafetyNet(uint32_t capacity) : capacity_(capacity) {}

    bool is_following() const { return is_following_; }
    uint64_t num_switches() const { return num_switches_; }

    void add(uint32_t num_asked, uint32_t num_lru_hits, uint32_t num_hits) {
        double keep = std::exp(-double(num_asked - num_lru_hits) / (kTurnovers * capacity_));
        lead_ = lead_ * keep + (double(num_hits) - double(num_lru_hits));
        asked_ = asked_ * keep + num_asked;
        bool follow = is_following_ ? lead_ > 0 : lead_ > kEnterShare * asked_;
        num_switches_ += follow != is_following_;
        is_following_ = follow;
    }
};

}  // namespace pagemill::cache
