// Which of two policies to follow, from what their shadow caches would have hit.
//
// The lead of ReuseRank over LRU is summed in blocks; a turnover is as many blocks computed, under
// LRU, as the pool has; what is asked in one is a mean over about two. LRU is followed first.
// ReuseRank is followed once the lead has risen, from its lowest since the last switch, by 1 % of
// what is asked in a turnover; and LRU again once the lead has fallen, from its highest since, by
// 4 % and in two requests: in a small pool one long request is more than that. A switch costs as
// well: the pool gets what it lacks only when it is asked for.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace pagemill::cache {

class SafetyNet {
    static constexpr double kMeanTurnovers = 2, kRise = 0.01, kFall = 0.04;
    static constexpr uint32_t kLosses = 2;
    const double capacity_;
    double lead_ = 0, turn_ = 0;  // turn: the lead's lowest or highest since the switch
    double asked_ = 0, missed_ = 0;
    uint32_t num_losses_ = 0;    // requests that lost since the turn
    bool is_following_ = false;  // ReuseRank

    bool must_switch() const {
        double asked_in_turnover = asked_ / std::max(missed_, 1.0) * capacity_;
        double moved = std::abs(lead_ - turn_) / asked_in_turnover;
        return is_following_ ? moved > kFall && num_losses_ >= kLosses : moved > kRise;
    }

public:
    explicit SafetyNet(uint32_t capacity) : capacity_(capacity) {}

    bool is_following() const { return is_following_; }

    void add(uint32_t num_asked, uint32_t num_lru_hits, uint32_t num_hits) {
        double missed = double(num_asked - num_lru_hits);
        double keep = std::exp(-missed / (kMeanTurnovers * capacity_));
        asked_ = asked_ * keep + num_asked;
        missed_ = missed_ * keep + missed;
        lead_ += double(num_hits) - double(num_lru_hits);
        num_losses_ += num_hits < num_lru_hits;
        if (is_following_ ? lead_ >= turn_ : lead_ <= turn_) {
            turn_ = lead_;
            num_losses_ = 0;
        }
        if (!must_switch()) return;
        is_following_ = !is_following_;
        turn_ = lead_;
        num_losses_ = 0;
    }
};

}  // namespace pagemill::cache
