// Random calls under the sanitizers, the whole cache checked after each. What they should give is
// the business of tests/fuzz; here nothing may be read or written out of place.
#include <algorithm>

#include "cache/cache_core.hpp"
#include "tests/check.hpp"

using namespace pagemill::cache;

namespace {

struct Sequence {
    TableId table;
    std::vector<uint32_t> tokens;
    uint32_t num_slots, num_committed;
};

struct Player {
    uint64_t state;
    CacheCore core;
    std::vector<Sequence> sequences;
    std::vector<Copy> copies;

    Player(uint64_t seed, const CoreConfig &config) : state(seed), core(config) {}

    uint32_t random(uint32_t below) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return uint32_t(state >> 33) % below;
    }
    void open() {
        std::vector<uint32_t> tokens(random(90));
        uint32_t branch = random(100);
        for (uint32_t i = 0; i < tokens.size(); ++i) tokens[i] = i < branch ? 1 : 2;
        Match match = core.peek_match(tokens.data(), uint32_t(tokens.size()), Hash{});
        core.can_admit(match, 100, random(3), random(40));
        uint32_t n = match.num_tokens;
        sequences.push_back({core.open(match, false), std::move(tokens), n, n});
    }
    void grow(Sequence &sequence) {
        uint32_t wanted = sequence.num_committed + random(50);
        if (!core.extend(sequence.table, wanted, copies)) return;
        sequence.num_slots = std::max(sequence.num_slots, wanted);
        if (sequence.tokens.size() < wanted) sequence.tokens.resize(wanted, 3);
        if (random(4) == 0) return;
        sequence.num_committed = wanted;
        core.commit(sequence.table, sequence.tokens.data(), sequence.tokens.size(), wanted);
    }
    void play() {
        uint32_t choice = random(10);
        if (choice < 2 && sequences.size() < 6) return open();
        if (choice == 2) {
            core.release_copies(copies);
            copies.clear();
        }
        if (choice == 3) core.evict(random(core.num_groups()), random(4));
        if (sequences.empty()) return;
        uint32_t picked = random(uint32_t(sequences.size()));
        if (choice == 4 && core.peek_table(sequences[picked].table).num_copies == 0) {
            Sequence twin = sequences[picked];
            twin.table = core.fork(twin.table);
            sequences.push_back(twin);
        } else if (choice == 5) {
            core.release(sequences[picked].table);
            sequences.erase(sequences.begin() + picked);
        } else if (choice > 5) {
            grow(sequences[picked]);
        }
    }
};

}  // namespace

TEST(random_calls_keep_the_cache_whole) {
    const std::vector<std::vector<uint32_t>> windows = {{0}, {0, 20}, {17, 33}, {0, 0, 1}};
    for (uint64_t seed = 1; seed <= 40; ++seed) {
        const auto &window = windows[seed % windows.size()];
        std::vector<uint32_t> sizes(window.size(), uint32_t(6 + seed % 23));
        Player player(seed, {sizes, window, 16, seed % 5 != 0, seed % 2 == 0, true});
        for (int step = 0; step < 300; ++step) {
            player.play();
            auto failure = player.core.check(2);
            CHECK((failure ? failure->words : "") == "");
            player.core.log().clear();
        }
        for (Sequence &sequence : player.sequences) player.core.release(sequence.table);
        player.core.release_copies(player.copies);
        CHECK(player.core.reset() && !player.core.check(2));
    }
}
