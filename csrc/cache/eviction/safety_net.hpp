// How far the pool may differ from an LRU cache of its size, so that it hits hardly less.
//
// The pool *lacks* a block that LRU's shadow holds and it has not. A hit that LRU would have had
// and the pool has not is of a block that it lacks, and brings that block back. So a loss from now
// on is at most what is lacked now and what is evicted from the pool while LRU holds it; and there
// is a leaf that LRU does not hold as long as anything is lacked. A block that LRU holds may go
// only while, with it (C blocks in the pool, leads in blocks over LRU, a turnover is C blocks
// computed under LRU):
//
// 1. lacking <= lead so far + 1 % of what was asked so far, or of 10 C if that is more. So over the
//    whole of any traffic the loss is at most that 1 %.
// 2. lacking <= C / 10 x trust - the fall of the lead within ten turnovers. While trust is 1, any
//    ten turnovers lose at most C / 10, which is 1 % of what is asked in them. A strict net stays
//    there. Else trust grows as 1 + (turnovers / 5.5)^2 since ReuseRank's shadow or the pool fell
//    C / 10 behind, as long as that shadow gains 2 % of C in each of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <utility>

namespace pagemill::cache {

// A lead over LRU, and its fall from the highest point of the last ten turnovers.
class Lead {
    static constexpr double kTurnovers = 10;
    std::deque<std::pair<double, double>> highs_{{0.0, 0.0}};  // (turnover, blocks), falling
    double blocks_ = 0;

public:
    double blocks() const { return blocks_; }
    double fall() const { return highs_.front().second - blocks_; }
    void add(double turnover, double gain) {
        blocks_ += gain;
        while (!highs_.empty() && highs_.back().second <= blocks_) highs_.pop_back();
        highs_.emplace_back(turnover, blocks_);
        while (highs_.front().first < turnover - kTurnovers) highs_.pop_front();
    }
};

class SafetyNet {
    static constexpr double kTurnovers = 10, kMayLose = 0.01, kGain = 0.02, kTrustTurnovers = 5.5;
    const double capacity_, slack_;  // slack: what any ten turnovers may lose
    const bool is_strict_;
    Lead pool_, shadow_;
    double asked_ = 0, turnover_ = 0;
    double setback_turnover_ = 0, setback_lead_ = 0;

    double trust() const {
        double turnovers = turnover_ - setback_turnover_;
        double gain = shadow_.blocks() - setback_lead_;
        if (is_strict_ || gain < kGain * capacity_ * turnovers) return 1;
        double grown = turnovers / kTrustTurnovers;
        return 1 + grown * grown;
    }

public:
    SafetyNet(uint32_t capacity, bool is_strict)
        : capacity_(capacity),
          slack_(kMayLose * kTurnovers * capacity_),
          is_strict_(is_strict) {}

    // A request asked for so many blocks; LRU, ReuseRank alone, and the pool hit so many.
    void add(uint32_t num_asked, uint32_t num_lru_hits, uint32_t num_shadow_hits,
             uint32_t num_hits) {
        asked_ += num_asked;
        turnover_ += (double(num_asked) - num_lru_hits) / capacity_;
        pool_.add(turnover_, double(num_hits) - num_lru_hits);
        shadow_.add(turnover_, double(num_shadow_hits) - num_lru_hits);
        if (std::max(pool_.fall(), shadow_.fall()) <= slack_) return;
        setback_turnover_ = turnover_;
        setback_lead_ = shadow_.blocks();
    }
    bool may_lack(uint32_t num_blocks) const {
        double ever = pool_.blocks() + std::max(kMayLose * asked_, slack_);
        return num_blocks <= std::min(ever, slack_ * trust() - pool_.fall());
    }
};

}  // namespace pagemill::cache
