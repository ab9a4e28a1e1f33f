#include "cache/replay.hpp"

#include <algorithm>
#include <queue>
#include <utility>

namespace pagemill::cache {

std::vector<int32_t> replay(CacheCore &core, const Requests &requests) {
    std::vector<int32_t> hits(requests.size());
    std::vector<uint32_t> asked;
    std::vector<Copy> copies;
    for (size_t i = 0; i < requests.size(); ++i) {
        auto ids = requests.ids(i);
        asked.assign(ids.begin(), ids.end());
        if (requests.add_last_token) asked.push_back(0);
        core.advance(uint64_t(requests.times_ns[i]));
        Match match = core.peek_match(asked.data(), uint32_t(asked.size()), Hash{});
        TableId table = core.open(match, false);
        hits[i] = int32_t(match.num_tokens);
        if (core.extend(table, uint32_t(ids.size()), copies))
            core.commit(table, asked.data(), asked.size(), uint32_t(ids.size()));
        else
            hits[i] = kDoesNotFit;
        core.release_copies(copies);
        copies.clear();
        core.release(table, {true, requests.has_tool_calls[i] != 0});
        core.log().clear();
    }
    return hits;
}

namespace {

class Clairvoyant {
    static constexpr int64_t kNever = INT64_MAX;
    const Requests &requests_;
    const size_t capacity_;
    std::vector<int64_t> next_use_;    // of each access
    std::vector<int64_t> kept_until_;  // of an id: its next use while it is kept, else 0
    std::priority_queue<std::pair<int64_t, uint32_t>> furthest_;
    size_t num_kept_ = 0;

    bool is_kept(uint32_t id) const { return kept_until_[id] != 0; }
    void drop_furthest(size_t num_wanted) {
        while (num_kept_ + num_wanted > capacity_ && !furthest_.empty()) {
            auto [next_use, id] = furthest_.top();
            furthest_.pop();
            if (kept_until_[id] != next_use) continue;  // used since, or gone
            kept_until_[id] = 0;
            --num_kept_;
        }
    }

public:
    Clairvoyant(const Requests &requests, size_t capacity)
        : requests_(requests), capacity_(capacity), next_use_(requests.token_ids.size()) {
        auto ids = requests.token_ids;
        uint32_t largest = ids.empty() ? 0 : *std::max_element(ids.begin(), ids.end());
        std::vector<int64_t> later(size_t(largest) + 1, kNever);
        kept_until_.assign(size_t(largest) + 1, 0);
        // What a request that does not fit would use is of no use to any cache of this size.
        for (size_t request = requests.size(); request-- > 0;) {
            if (requests.ids(request).size() > capacity) continue;
            for (int64_t i = requests.start[request + 1]; i-- > requests.start[request];) {
                next_use_[size_t(i)] = later[ids[size_t(i)]];
                later[ids[size_t(i)]] = i;
            }
        }
    }

    int32_t serve(size_t i) {
        auto ids = requests_.ids(i);
        int32_t num_hits = 0;
        size_t num_new = 0;
        for (uint32_t id : ids) is_kept(id) ? ++num_hits : ++num_new;
        if (ids.size() > capacity_) return num_hits;  // passes by, and nothing is lost
        for (uint32_t id : ids)
            if (is_kept(id)) kept_until_[id] = -1;  // held: its entries in the heap are stale
        drop_furthest(num_new);
        for (size_t j = 0; j < ids.size(); ++j) {
            int64_t next_use = next_use_[size_t(requests_.start[i]) + j];
            kept_until_[ids[j]] = next_use;
            furthest_.emplace(next_use, ids[j]);
        }
        num_kept_ += num_new;
        return num_hits;
    }
};

}  // namespace

std::vector<int32_t> clairvoyant_hits(const Requests &requests, uint32_t capacity) {
    Clairvoyant cache(requests, capacity);
    std::vector<int32_t> hits(requests.size());
    for (size_t i = 0; i < requests.size(); ++i) hits[i] = cache.serve(i);
    return hits;
}

UseIntervals use_intervals(const Requests &requests, size_t num_warmup, uint32_t max_blocks) {
    auto all = requests.token_ids;
    uint32_t largest = all.empty() ? 0 : *std::max_element(all.begin(), all.end());
    std::vector<int32_t> user(size_t(largest) + 1, -1);
    UseIntervals out;
    for (size_t i = 0; i < requests.size(); ++i) {
        auto ids = requests.ids(i);
        int32_t before = -1;  // the user of the run that is open
        for (size_t j = 0; j < ids.size(); ++j) {
            int32_t first = std::exchange(user[ids[j]], int32_t(i));
            if (i < num_warmup) first = -1;
            bool is_open = first >= 0 && before == first && j + 1 < ids.size() &&
                           uint32_t(out.num_blocks.back()) < max_blocks;
            before = first;
            if (first < 0) continue;
            if (is_open) {
                ++out.num_blocks.back();
                continue;
            }
            out.first.push_back(first);
            out.last.push_back(int32_t(i));
            out.position.push_back(int32_t(j));
            out.num_blocks.push_back(1);
        }
    }
    return out;
}

}  // namespace pagemill::cache
