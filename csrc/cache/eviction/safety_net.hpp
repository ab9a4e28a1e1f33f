// Which of two policies to follow, from what their shadow caches would have hit.
//
// The lead of ReuseRank over LRU is summed in blocks; a turnover is as many blocks computed, under
// LRU, as the pool has; what is asked in one is a mean over about two. LRU is followed first.
// ReuseRank is followed once the lead has risen, from its lowest since the last switch, by 1 % of
// what is asked in a turnover; and LRU again once the lead has fallen, from its highest since, by
// 4 %. A switch costs as well: the pool gets what it lacks only when it is asked for.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace pagemill::cache {

class SafetyNet {
    static constexpr double kMeanTurnovers = 2, kRise = 0.01, kFall = 0.04;
    const double capacity_;
    double lead_ = 0, turn_ = 0;  // turn: the lead's lowest or highest since the switch
    double asked_ = 0, missed_ = 0;
    bool is_following_ = false;  // ReuseRank

public:
    explicit SafetyNet(uint32_t capacity) : capacity_(capacity) {}

    bool is_following() const { return is_following_; }

    void add(uint32_t num_asked, uint32_t num_lru_hits, uint32_t num_hits) {
        double missed = double(num_asked - num_lru_hits);
        double keep = std::exp(-missed / (kMeanTurnovers * capacity_));
        asked_ = asked_ * keep + num_asked;
        missed_ = missed_ * keep + missed;
        double asked_in_turnover = asked_ / std::max(missed_, 1.0) * capacity_;
        lead_ += double(num_hits) - double(num_lru_hits);
        turn_ = is_following_ ? std::max(turn_, lead_) : std::min(turn_, lead_);
        double moved = std::abs(lead_ - turn_) / asked_in_turnover;
        if (moved <= (is_following_ ? kFall : kRise)) return;
        is_following_ = !is_following_;
        turn_ = lead_;
    }
};

}  // namespace pagemill::cache
