// LHD (Beckmann et al., NSDI 2018): of 64 leaves, picked at even steps, evict the one whose class
// and age promise the fewest hits for the room and time it takes. Ages count blocks that were used,
// in steps of a part of the pool; a class is the logarithm of the age at the last hit. For
// comparison.
#include <algorithm>
#include <array>
#include <bit>

#include "cache/eviction/policies.hpp"
#include "cache/zeroed.hpp"

namespace pagemill::cache {

namespace {

class Lhd : public EvictionPolicy {
    static constexpr uint32_t kMaxAge = 512, kNumClasses = 8, kNumSamples = 64;
    static constexpr double kKeep = 0.9;
    struct Fact {
        uint64_t used;
        uint32_t block_class, place;  // place: in leaves_, while it is a leaf
    };
    struct Class {
        std::array<double, kMaxAge> hits{}, drops{}, density{};
    };
    Zeroed<Fact> facts_;
    std::vector<BlockId> leaves_;
    std::array<Class, kNumClasses> classes_;
    const uint64_t age_step_;
    uint64_t clock_ = 0, next_ranking_;
    uint32_t pick_ = 1;

    uint32_t age(const Fact &fact) const {
        return uint32_t(std::min<uint64_t>((clock_ - fact.used) / age_step_, kMaxAge - 1));
    }
    double density(BlockId leaf) const {
        const Fact &fact = facts_[leaf];
        return classes_[fact.block_class].density[age(fact)];
    }
    void use_as(BlockId block, uint32_t block_class) {
        facts_[block].used = ++clock_;
        facts_[block].block_class = block_class;
        if (clock_ >= next_ranking_) rank();
    }
    void rank() {
        next_ranking_ = clock_ + 8 * facts_.size();
        for (Class &of : classes_) {
            double hits = 0, events = 0, room = 0;
            for (uint32_t a = kMaxAge; a-- > 0;) {
                hits += of.hits[a] *= kKeep;
                events += of.hits[a] + (of.drops[a] *= kKeep);
                room += events;
                of.density[a] = room > 0 ? hits / room : 0;
            }
        }
    }

public:
    explicit Lhd(const PolicyConfig &config)
        : facts_(config.num_blocks),
          age_step_(std::max(1u, config.num_blocks / 32)),
          next_ranking_(config.num_blocks) {
        for (Class &of : classes_)  // until something is known: the oldest first
            for (uint32_t a = 0; a < kMaxAge; ++a) of.density[a] = 1.0 / (a + 1);
    }

    void published(BlockId block, Key, uint32_t) override { use_as(block, 0); }
    void used(BlockId block, Use use) override {
        if (use != Use::kFound) return;
        const Fact &fact = facts_[block];
        uint32_t a = age(fact);
        ++classes_[fact.block_class].hits[a];
        use_as(block, std::min(uint32_t(std::bit_width(a)) + 1, kNumClasses - 1));
    }
    void dropped(BlockId block) override {
        const Fact &fact = facts_[block];
        ++classes_[fact.block_class].drops[age(fact)];
    }
    void moved(BlockId from, BlockId to) override { facts_[to] = facts_[from]; }
    void add(BlockId leaf) override {
        facts_[leaf].place = uint32_t(leaves_.size());
        leaves_.push_back(leaf);
    }
    void remove(BlockId leaf) override {
        BlockId last = leaves_.back();
        leaves_[facts_[leaf].place] = last;
        facts_[last].place = facts_[leaf].place;
        leaves_.pop_back();
    }
    BlockId victim() override {
        BlockId best = kNullBlock;
        double lowest = 0;
        for (size_t i = 0; i < std::min<size_t>(kNumSamples, leaves_.size()); ++i) {
            pick_ = pick_ * 1664525 + 1013904223;
            BlockId leaf = leaves_[leaves_.size() <= kNumSamples ? i : pick_ % leaves_.size()];
            double found = density(leaf);
            if (best == kNullBlock || found < lowest ||
                (found == lowest && facts_[leaf].used < facts_[best].used)) {
                best = leaf;
                lowest = found;
            }
        }
        return best;
    }
};

}  // namespace

PolicyPointer make_lhd(const PolicyConfig &config) { return std::make_unique<Lhd>(config); }

}  // namespace pagemill::cache
