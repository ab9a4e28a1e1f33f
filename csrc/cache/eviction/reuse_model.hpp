// What ReuseRank learns: how likely is a block of some class, unused for so long, to be used again
// before a time, for each second that it is kept until then?
//
// Each request that ends leaves a *record*: its time, and how many of its blocks were not used
// again yet. Ages fall into 20 buckets: [0, 0.5 s), and then doubling. When a record crosses the
// lower edge of a bucket its unused blocks are *exposed* to the bucket; a use counts in the bucket
// of its age. hazard = reuse / exposure, drawn to the hazard of all classes together by
// 81,920 tokens' worth of blocks, and smoothed over neighbouring buckets.
//
// 1. reuse <= exposure in every class and bucket, and no record has fewer than 0 unused blocks.
// 2. A record younger than the first of the log is there; an older one is only known to be old.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>

namespace pagemill::cache {

class ReuseModel {
public:
    static constexpr uint32_t kNumBuckets = 20, kNumSteps = 5, kNumPaths = 2 * kNumSteps;
    static constexpr uint32_t kNumClasses = kNumSteps * kNumPaths;
    static constexpr uint32_t kNumCells = kNumClasses * kNumBuckets;
    static constexpr double kPriorTokens = 81920;  // n0

    // 1, 2, 3-4, 5-8, 9 and more
    static uint32_t step(uint32_t count) {
        return count <= 2 ? (count ? count - 1 : 0) : count <= 4 ? 2 : count <= 8 ? 3 : 4;
    }
    // Uses of the block; request ends on its path; did the request end in tool calls?
    static uint8_t class_of(uint32_t num_uses, uint32_t num_turns, bool has_tool_calls) {
        return uint8_t((step(num_turns) * 2 + has_tool_calls) * kNumSteps + step(num_uses));
    }
    static uint32_t cell(uint32_t block_class, uint32_t bucket) {
        return block_class * kNumBuckets + bucket;
    }

private:
    struct Record {
        uint64_t time_ns;
        uint32_t path;  // class / kNumSteps
        std::array<uint32_t, kNumSteps> num_unused;
    };
    using Table = std::array<std::array<double, kNumBuckets>, kNumClasses>;

    const double prior_blocks_;
    const size_t max_records_;
    std::deque<Record> log_;
    uint32_t first_ = 1;                        // number of log_.front()
    std::array<uint32_t, kNumBuckets> crossed_{};  // records before this one crossed the lower edge
    uint64_t now_ns_ = 0;
    Table exposure_{}, reuse_{}, rank_{};
    std::array<uint16_t, kNumCells> order_, place_;  // cells by rank, and the reverse
    uint32_t num_requests_ = 0, next_ranking_ = 1, num_rankings_ = 0;

    uint32_t bucket_of_age(uint64_t age_ns) const;
    void sweep();
    void rank_cells();

public:
    ReuseModel(uint32_t block_tokens, size_t max_records);

    bool advance(uint64_t now_ns);  // false: no time has passed
    uint32_t bucket_of(uint32_t record) const;
    uint32_t newest() const { return first_ + uint32_t(log_.size()) - 1; }

    // A request ended: the record that its blocks now belong to.
    uint32_t start_record(uint32_t num_turns, bool has_tool_calls);
    void add_use(uint8_t block_class);  // to the newest record
    void add_reuse(uint32_t record, uint8_t block_class);
    void finish_record();  // after its uses; may rank anew

    uint32_t num_rankings() const { return num_rankings_; }
    double rank(uint32_t cell) const { return rank_[cell / kNumBuckets][cell % kNumBuckets]; }
    uint32_t cell_at(uint32_t place) const { return order_[place]; }
    uint32_t place_of(uint32_t cell) const { return place_[cell]; }
    // Of two cells in the order: does nothing but age decide between them?
    bool is_tie(uint32_t place, uint32_t other_place) const;
};

}  // namespace pagemill::cache
