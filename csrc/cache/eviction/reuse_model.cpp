#include "cache/eviction/reuse_model.hpp"

#include <algorithm>
#include <bit>
#include <numeric>

namespace pagemill::cache {

static constexpr uint64_t kFirstEdge = 500'000'000;  // ns
static constexpr uint32_t kMaxRequestsBetween = 256;

ReuseModel::ReuseModel(uint32_t block_tokens, size_t max_records)
    : prior_blocks_(kPriorTokens / block_tokens), max_records_(max_records) {
    crossed_.fill(first_);
    rank_cells();
}

static uint64_t lower_edge(uint32_t bucket) { return bucket ? kFirstEdge << (bucket - 1) : 0; }

static double seconds_of(uint32_t bucket) {
    return double(lower_edge(bucket + 1) - lower_edge(bucket)) / 1e9;
}

uint32_t ReuseModel::bucket_of_age(uint64_t age_ns) const {
    uint64_t edges = age_ns / kFirstEdge;
    return std::min(uint32_t(std::bit_width(edges)), kNumBuckets - 1);
}

uint32_t ReuseModel::bucket_of(uint32_t record) const {
    if (record < first_ || log_.empty()) return kNumBuckets - 1;
    return bucket_of_age(now_ns_ - log_[record - first_].time_ns);
}

bool ReuseModel::advance(uint64_t now_ns) {
    if (now_ns <= now_ns_) return false;
    now_ns_ = now_ns;
    sweep();
    return true;
}

// One pointer a bucket goes over the log: each record crosses each edge once.
void ReuseModel::sweep() {
    for (uint32_t b = 1; b < kNumBuckets; ++b) {
        uint32_t &at = crossed_[b];
        for (; at <= newest(); ++at) {
            const Record &record = log_[at - first_];
            if (now_ns_ - record.time_ns < lower_edge(b)) break;
            for (uint32_t i = 0; i < kNumSteps; ++i)
                exposure_[record.path * kNumSteps + i][b] += record.num_unused[i];
        }
        if (at == first_ && newest() >= first_) return;  // nothing is this old
    }
}

uint32_t ReuseModel::start_record(uint32_t num_turns, bool has_tool_calls) {
    if (log_.size() >= max_records_) {
        log_.pop_front();
        ++first_;
        for (uint32_t &at : crossed_) at = std::max(at, first_);
    }
    log_.push_back({now_ns_, class_of(1, num_turns, has_tool_calls) / kNumSteps, {}});
    return newest();
}

void ReuseModel::add_use(uint8_t block_class) {
    ++log_.back().num_unused[block_class % kNumSteps];
    ++exposure_[block_class][0];
}

void ReuseModel::add_reuse(uint32_t record, uint8_t block_class) {
    if (record < first_) return;  // forgotten
    --log_[record - first_].num_unused[block_class % kNumSteps];
    ++reuse_[block_class][bucket_of(record)];
}

void ReuseModel::finish_record() {
    if (++num_requests_ < next_ranking_) return;
    next_ranking_ = num_requests_ + std::clamp(num_requests_ / 50, 8u, kMaxRequestsBetween);
    rank_cells();
}

using Hazard = std::array<double, ReuseModel::kNumBuckets>;

static Hazard smooth(const Hazard &raw) {
    Hazard out;
    const size_t last = raw.size() - 1;
    for (size_t b = 0; b <= last; ++b)
        out[b] = (raw[b ? b - 1 : 0] + 2 * raw[b] + raw[std::min(b + 1, last)]) / 4;
    return out;
}

// The best chance of a use for a second of keeping, over all times to stop at.
static double best_rate(const Hazard &hazard, uint32_t bucket) {
    double alive = 1, seconds = 0, best = 0;
    for (uint32_t end = bucket; end < hazard.size(); ++end) {
        seconds += alive * seconds_of(end) * (1 - hazard[end] / 2);
        alive *= 1 - hazard[end];
        best = std::max(best, (1 - alive) / seconds);
    }
    return best;
}

void ReuseModel::rank_cells() {
    ++num_rankings_;
    Hazard all;
    for (uint32_t b = 0; b < kNumBuckets; ++b) {
        double reuse = 0, exposure = 0;
        for (uint32_t c = 0; c < kNumClasses; ++c) {
            reuse += reuse_[c][b];
            exposure += exposure_[c][b];
        }
        all[b] = exposure > 0 ? reuse / exposure : 0;
    }
    for (uint32_t c = 0; c < kNumClasses; ++c) {
        Hazard hazard;
        for (uint32_t b = 0; b < kNumBuckets; ++b)
            hazard[b] = exposure_[c][b] > 0 ? (reuse_[c][b] + prior_blocks_ * all[b]) /
                                                  (exposure_[c][b] + prior_blocks_)
                                            : all[b];
        hazard = smooth(smooth(hazard));
        for (uint32_t b = 0; b < kNumBuckets; ++b) rank_[c][b] = best_rate(hazard, b);
    }
    std::iota(order_.begin(), order_.end(), uint16_t(0));
    std::sort(order_.begin(), order_.end(), [this](uint16_t a, uint16_t b) {
        if (rank(a) != rank(b)) return rank(a) < rank(b);
        if (a % kNumBuckets != b % kNumBuckets) return a % kNumBuckets > b % kNumBuckets;
        return a < b;
    });
    for (uint32_t place = 0; place < kNumCells; ++place) place_[order_[place]] = uint16_t(place);
}

bool ReuseModel::is_tie(uint32_t place, uint32_t other_place) const {
    uint32_t cell = order_[place], other = order_[other_place];
    return cell % kNumBuckets == other % kNumBuckets && rank(cell) == rank(other);
}

}  // namespace pagemill::cache
