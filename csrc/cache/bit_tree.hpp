// A set of small integers as bits, with a bit a level up for every word that is not zero: insert,
// erase and smallest member touch one word a level (four levels hold 16 million).
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pagemill::cache {

class BitTree {
    std::vector<std::vector<uint64_t>> levels_;  // [0] has a bit for each member

public:
    static constexpr uint32_t kNone = UINT32_MAX;

    explicit BitTree(uint32_t size) {
        for (size_t words = size;;) {
            words = (words + 63) / 64;
            levels_.emplace_back(words ? words : 1, 0);
            if (words <= 1) return;
        }
    }

    bool contains(uint32_t i) const { return levels_[0][i / 64] >> (i % 64) & 1; }

    void insert(uint32_t i) {
        for (auto &level : levels_) {
            uint64_t before = level[i / 64];
            level[i / 64] = before | uint64_t(1) << (i % 64);
            if (before) return;  // the levels above know this word already
            i /= 64;
        }
    }

    void erase(uint32_t i) {
        for (auto &level : levels_) {
            uint64_t &word = level[i / 64];
            word &= ~(uint64_t(1) << (i % 64));
            if (word) return;
            i /= 64;
        }
    }

    uint32_t smallest() const {
        uint32_t i = 0;
        for (size_t level = levels_.size(); level-- > 0;) {
            uint64_t word = levels_[level][i];
            if (!word) return kNone;
            i = i * 64 + uint32_t(std::countr_zero(word));
        }
        return i;
    }

    // The bits of the aligned run of four that i lies in.
    uint32_t quad(uint32_t i) const { return levels_[0][i / 64] >> (i % 64 & 60) & 15; }

    size_t num_bytes() const {
        size_t sum = 0;
        for (const auto &level : levels_) sum += 8 * level.size();
        return sum;
    }
};

}  // namespace pagemill::cache
