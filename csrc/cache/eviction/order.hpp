// In which order the published blocks of one group go. Below, what goes first stands first:
//
//     ranked, lowest band first: the usual one as the policy says, others least recently used first
//     kept: a lifetime (TTL) runs; lowest band, then the one that ends first
//     pinned; lowest band, then the oldest pin
//
// 1. Only leaves are in one of the three; a block has at least the band, lifetime and pin of its
//    children, since raising it raises its ancestors.
// 2. Pins of a tenant are at most `pin_budget`: one more and the oldest loses its pin. Pinned
//    blocks are still evictable when nothing else is left: a pin never keeps a request waiting.
// Where tenants have shares each has a line of its own as well, all bands least recently used
// first: for its quota, and, where it is fair, in place of the common line (kEverybody).
//
// 3. Plain: policy LRU, and nothing raised yet. Then nothing is kept here: the pool's list is the
//    order, and the first raise counts what is there.
#pragma once

#include <map>
#include <optional>
#include <set>

#include "cache/eviction/linked_lru.hpp"
#include "cache/flat_index.hpp"

namespace pagemill::cache {

struct Retention {
    static constexpr uint8_t kDefaultBand = 35, kNumBands = 101;
    uint8_t band = kDefaultBand;
    uint64_t ttl_until_ns = 0;
    uint32_t pin_tenant = 0;  // 0: not pinned
    uint64_t ttl_ns = 0;      // the lifetime that starts again at a hit; 0: none
    bool is_default() const {
        return band == kDefaultBand && !ttl_until_ns && !pin_tenant && !ttl_ns;
    }
};

class EvictionOrder {
    enum Place : uint8_t { kNowhere, kRanked, kKept, kPinned };
    struct Fact {
        uint32_t num_children, position;
        uint8_t band;
        Place place;
        uint32_t tenant, pin_tenant;
        uint64_t ttl_until_ns, ttl_ns, pin_moment;
    };
    using Pins = std::set<std::pair<uint64_t, BlockId>>;              // (moment, block)
    using Waiting = std::set<std::tuple<uint8_t, uint64_t, BlockId>>;  // (band, moment, block)
    static constexpr uint32_t kEverybody = 0;

    const BlockPool &pool_;
    const FlatIndex &index_;
    const bool has_parents_;
    PolicyConfig config_;
    MakePolicy make_;
    bool is_on_;
    Zeroed<Fact> facts_;
    using Ranks = std::pair<uint8_t, uint32_t>;  // (band, whose line)
    std::map<Ranks, std::unique_ptr<EvictionPolicy>> ranked_;  // made when first used
    EvictionPolicy *usual_ = nullptr;  // of the default band: the one that was asked for
    std::map<uint32_t, Waiting> kept_, pinned_;  // by whose line
    std::set<uint8_t> bands_;  // in use
    std::set<std::tuple<uint64_t, uint8_t, BlockId>> ends_;  // of kept leaves: (end, band, block)
    std::map<uint32_t, Pins> pins_of_tenant_;
    uint32_t pin_budget_;
    uint64_t now_ns_ = 0, clock_ = 0, num_dropped_pins_ = 0;

    bool has_shares_ = false, is_fair_ = false;
    uint32_t quota_blocks_ = 0;
    std::map<uint32_t, uint32_t> num_cached_;  // of a tenant, where there are shares
    std::set<std::pair<uint32_t, uint32_t>> by_share_;  // (number, tenant)
    std::optional<LeafLinks> links_, tenant_links_;

    bool is_common(const Fact &fact) const { return fact.tenant == kEverybody || !is_fair_; }
    EvictionPolicy &policy(uint8_t band, uint32_t tenant);
    // The lines that a block stands in: (whose) and its policy there.
    template <typename Tell>
    void each_line(const Fact &fact, Tell tell) const {
        if (is_common(fact)) tell(kEverybody);
        if (fact.tenant != kEverybody) tell(fact.tenant);
    }
    template <typename Tell>
    void each_policy(const Fact &fact, Tell tell) {
        each_line(fact, [&](uint32_t line) { tell(policy(fact.band, line)); });
    }
    void count(uint32_t tenant, int change);
    BlockId victim_of(uint32_t line);
    BlockId victim_by_share();
    BlockId parent_of(BlockId block) const;
    Key known_key(BlockId block) const;
    void start();
    void count_child(BlockId block);
    void publish_again(BlockId block);  // to the policies of its lines
    void used(BlockId block, Use use);
    bool is_leaf(BlockId block) const;
    void enter(BlockId leaf);
    void leave(BlockId block);
    bool raise(BlockId block, const Retention &wanted);
    void raise_ancestors(BlockId block, const Retention &wanted);
    void unpin(BlockId block);
    void pin(BlockId block, uint32_t tenant);
    void end_lifetimes();

public:
    EvictionOrder(const BlockPool &pool, const FlatIndex &index, bool has_parents,
                  const std::string &policy_name, uint32_t block_tokens);

    bool is_on() const { return is_on_; }
    uint64_t num_dropped_pins() const { return num_dropped_pins_; }
    void set_pin_budget(uint32_t num_blocks) { pin_budget_ = num_blocks; }
    // Before anything is published: a tenant keeps at most so many blocks cached when its requests
    // end; and, where it is fair, the tenant that has most loses first.
    void set_shares(uint32_t quota_blocks, bool is_fair);
    // The next leaf to go of a tenant that has more than its quota; else kNullBlock.
    BlockId over_quota(uint32_t tenant);
    // Another maker of policies, before anything is published: a plug-in.
    void set_policy(MakePolicy make);

    // All of these do nothing while the order is plain, but the last two.
    // A new block begins as `wanted` says, its band may be below the default; its ancestors are
    // raised to it.
    void published(BlockId block, const Retention &wanted = {}, uint32_t tenant = 0);
    void moved(BlockId from, BlockId to, bool was_evictable);
    void became_evictable(BlockId block);
    void became_held(BlockId block);
    void touched(BlockId block);
    void dropped(BlockId block);  // before its index entry goes
    void request_ended(std::span<const BlockId> path, const RequestEnd &end);
    void advance(uint64_t now_ns);
    BlockId victim();
    // No longer plain: bands, lifetimes or pins are coming.
    void be_on() {
        if (!is_on_) start();
    }
    // Raises the block and its ancestors; never lowers.
    void set_retention(BlockId block, const Retention &wanted);

    Retention retention(BlockId block) const;
    uint64_t now_ns() const { return now_ns_; }
    // What is wrong with the counts of one published block; nullptr: nothing.
    const char *wrong_with(BlockId block, uint32_t num_published_children) const;
    uint32_t num_children(BlockId block) const { return facts_[block].num_children; }
};

}  // namespace pagemill::cache
