#include "cache/eviction/order.hpp"

#include <algorithm>
#include <cstring>

#include "cache/bug.hpp"

namespace pagemill::cache {

static Key key_of(const Hash &hash) {
    Key key;
    std::memcpy(&key, hash.data(), sizeof key);
    return key;
}

EvictionOrder::EvictionOrder(const BlockPool &pool, const FlatIndex &index, bool has_parents,
                             const std::string &policy_name, uint32_t block_tokens)
    : pool_(pool),
      index_(index),
      has_parents_(has_parents),
      config_{pool.num_blocks(), block_tokens, &now_ns_},
      make_(find_policy(policy_name)),
      is_on_(policy_name != "lru"),
      pin_budget_(pool.num_blocks() / 2) {
    if (is_on_) facts_ = Zeroed<Fact>(pool.num_blocks());
}

void EvictionOrder::set_policy(MakePolicy make) {
    if (index_.num_published() > 0) bug("set_policy: blocks are published already");
    make_ = std::move(make);
    ranked_.clear();
    usual_ = nullptr;
    is_on_ = true;
    facts_ = Zeroed<Fact>(pool_.num_blocks());
}

EvictionPolicy &EvictionOrder::policy(uint8_t band, uint32_t tenant) {
    auto &found = ranked_[{band, tenant}];
    if (found) return *found;
    bands_.insert(band);
    if (band == Retention::kDefaultBand && tenant == kEverybody) {
        found = make_(config_);
        usual_ = found.get();
        return *found;
    }
    std::optional<LeafLinks> &links = tenant == kEverybody ? links_ : tenant_links_;
    if (!links) links.emplace(pool_.num_blocks());
    found = std::make_unique<LinkedLru>(*links);
    return *found;
}

// A tail has no hash: its parent's and its place in the pool make a key of its own.
Key EvictionOrder::known_key(BlockId block) const {
    if (index_.is_published(block)) return key_of(index_.hash(block));
    return (key_of(index_.parent(block)) ^ block) * 0x9E3779B97F4A7C15u;
}

BlockId EvictionOrder::parent_of(BlockId block) const {
    if (!has_parents_ || index_.is_first(block)) return kNullBlock;
    return index_.find(index_.parent(block));
}

// ---- the life of a block --------------------------------------------------------------------

void EvictionOrder::count_child(BlockId block) {
    BlockId parent = parent_of(block);
    uint32_t position = parent != kNullBlock ? facts_[parent].position + 1 : 0;
    if (parent != kNullBlock) ++facts_[parent].num_children;
    facts_[block].position = position;
}

void EvictionOrder::published(BlockId block, const Retention &wanted, uint32_t tenant) {
    if (!is_on_) return;
    facts_[block] = {0, 0, wanted.band, kNowhere, has_shares_ ? tenant : 0, 0, 0, 0, 0};
    count(facts_[block].tenant, 1);
    count_child(block);
    publish_again(block);
    raise(block, wanted);
    raise_ancestors(block, wanted);
}

void EvictionOrder::publish_again(BlockId block) {
    const Fact &fact = facts_[block];
    each_policy(fact, [&](EvictionPolicy &ranks) {
        ranks.published(block, known_key(block), fact.position);
    });
}

void EvictionOrder::used(BlockId block, Use use) {
    each_policy(facts_[block], [&](EvictionPolicy &ranks) { ranks.used(block, use); });
}

void EvictionOrder::moved(BlockId from, BlockId to, bool was_evictable) {
    if (!is_on_) return;
    if (was_evictable) leave(from);
    facts_[to] = facts_[from];
    each_policy(facts_[to], [&](EvictionPolicy &ranks) { ranks.moved(from, to); });
    if (uint32_t tenant = facts_[from].pin_tenant) {
        Pins &pins = pins_of_tenant_[tenant];
        pins.erase({facts_[from].pin_moment, from});
        pins.emplace(facts_[from].pin_moment, to);
    }
    facts_[from] = {};
}

bool EvictionOrder::is_leaf(BlockId block) const {
    return pool_.ref_count(block) == 0 && facts_[block].num_children == 0;
}

void EvictionOrder::became_evictable(BlockId block) {
    if (!is_on_) return;
    used(block, Use::kReleased);
    if (facts_[block].num_children == 0) enter(block);
}

void EvictionOrder::became_held(BlockId block) {
    if (is_on_) leave(block);
}

// A lifetime that still runs starts again. The block is held, so it stands nowhere.
void EvictionOrder::touched(BlockId block) {
    if (!is_on_) return;
    Fact &fact = facts_[block];
    used(block, Use::kFound);
    if (fact.ttl_ns && fact.ttl_until_ns > now_ns_ && fact.place == kNowhere)
        fact.ttl_until_ns = now_ns_ + fact.ttl_ns;
}

void EvictionOrder::dropped(BlockId block) {
    if (!is_on_) return;
    BlockId parent = parent_of(block);
    leave(block);
    unpin(block);
    each_policy(facts_[block], [&](EvictionPolicy &ranks) { ranks.dropped(block); });
    count(facts_[block].tenant, -1);
    facts_[block] = {};
    if (parent == kNullBlock) return;
    if (--facts_[parent].num_children == 0 && pool_.ref_count(parent) == 0) enter(parent);
}

void EvictionOrder::request_ended(std::span<const BlockId> path, const RequestEnd &end) {
    if (!is_on_ || !usual_) return;
    if (ranked_.size() == 1) return usual_->request_ended(path, end);
    std::vector<BlockId> part;
    for (BlockId block : path)
        if (facts_[block].band == Retention::kDefaultBand && is_common(facts_[block]))
            part.push_back(block);
    if (!part.empty()) usual_->request_ended(part, end);
}

// ---- which leaf stands where ----------------------------------------------------------------

void EvictionOrder::enter(BlockId leaf) {
    Fact &fact = facts_[leaf];
    if (fact.pin_tenant) {
        fact.place = kPinned;
        each_line(fact, [&](uint32_t line) {
            pinned_[line].emplace(fact.band, fact.pin_moment, leaf);
        });
    } else if (fact.ttl_until_ns > now_ns_) {
        fact.place = kKept;
        each_line(fact, [&](uint32_t line) {
            kept_[line].emplace(fact.band, fact.ttl_until_ns, leaf);
        });
        ends_.emplace(fact.ttl_until_ns, fact.band, leaf);
    } else {
        fact.place = kRanked;
        each_policy(fact, [&](EvictionPolicy &ranks) { ranks.add(leaf); });
    }
}

void EvictionOrder::leave(BlockId block) {
    Fact &fact = facts_[block];
    switch (fact.place) {
        case kNowhere: return;
        case kRanked:
            each_policy(fact, [&](EvictionPolicy &ranks) { ranks.remove(block); });
            break;
        case kKept:
            each_line(fact, [&](uint32_t line) {
                kept_[line].erase({fact.band, fact.ttl_until_ns, block});
            });
            ends_.erase({fact.ttl_until_ns, fact.band, block});
            break;
        case kPinned:
            each_line(fact, [&](uint32_t line) {
                pinned_[line].erase({fact.band, fact.pin_moment, block});
            });
            break;
    }
    fact.place = kNowhere;
}

void EvictionOrder::end_lifetimes() {
    while (!ends_.empty() && std::get<0>(*ends_.begin()) <= now_ns_) {
        BlockId block = std::get<2>(*ends_.begin());
        leave(block);
        enter(block);
    }
}

void EvictionOrder::advance(uint64_t now_ns) {
    if (now_ns <= now_ns_) return;
    now_ns_ = now_ns;
    if (!ends_.empty()) end_lifetimes();
}

// ---- retention ------------------------------------------------------------------------------

// What is published already becomes known, the least recently used first.
void EvictionOrder::start() {
    is_on_ = true;
    facts_ = Zeroed<Fact>(pool_.num_blocks());
    EvictionPolicy &ranks = policy(Retention::kDefaultBand, kEverybody);
    for (BlockId block = 1; block < pool_.num_blocks(); ++block) {
        if (!index_.is_cached(block)) continue;
        facts_[block].band = Retention::kDefaultBand;
        count_child(block);
        ranks.published(block, known_key(block), 0);
    }
    for (BlockId block = pool_.oldest(); block != kNullBlock; block = pool_.next(block)) {
        ranks.used(block, Use::kReleased);
        if (is_leaf(block)) enter(block);
    }
}

void EvictionOrder::unpin(BlockId block) {
    Fact &fact = facts_[block];
    if (!fact.pin_tenant) return;
    pins_of_tenant_[fact.pin_tenant].erase({fact.pin_moment, block});
    fact.pin_tenant = 0;
}

// Children are pinned before their parents, so a parent's pin is never the older one.
void EvictionOrder::pin(BlockId block, uint32_t tenant) {
    unpin(block);
    facts_[block].pin_tenant = tenant;
    facts_[block].pin_moment = ++clock_;
    Pins &pins = pins_of_tenant_[tenant];
    pins.emplace(clock_, block);
    if (pins.size() <= pin_budget_) return;
    BlockId oldest = pins.begin()->second;
    bool was_placed = facts_[oldest].place != kNowhere;
    leave(oldest);
    unpin(oldest);
    if (was_placed) enter(oldest);
    ++num_dropped_pins_;
}

bool EvictionOrder::raise(BlockId block, const Retention &wanted) {
    Fact &fact = facts_[block];
    if (fact.ttl_until_ns <= now_ns_) fact.ttl_ns = 0;  // it has run out: nothing starts it again
    if (fact.band >= wanted.band && fact.ttl_until_ns >= wanted.ttl_until_ns &&
        fact.ttl_ns >= wanted.ttl_ns && !wanted.pin_tenant)
        return false;
    bool was_placed = fact.place != kNowhere;
    leave(block);
    if (wanted.band > fact.band) {
        each_policy(fact, [&](EvictionPolicy &ranks) { ranks.dropped(block); });
        fact.band = wanted.band;
        publish_again(block);
        if (pool_.ref_count(block) == 0) used(block, Use::kReleased);
    }
    fact.ttl_until_ns = std::max(fact.ttl_until_ns, wanted.ttl_until_ns);
    fact.ttl_ns = std::max(fact.ttl_ns, wanted.ttl_ns);
    if (was_placed) enter(block);
    if (wanted.pin_tenant) {
        leave(block);
        pin(block, wanted.pin_tenant);
        if (was_placed && facts_[block].place == kNowhere) enter(block);
    }
    return true;
}

void EvictionOrder::set_retention(BlockId block, const Retention &wanted) {
    if (!index_.is_cached(block))
        bug("set_retention: block " + std::to_string(block) + " is not cached");
    if (wanted.band >= Retention::kNumBands) bug("set_retention: a band is 0 to 100");
    if (!is_on_) start();
    if (raise(block, wanted)) raise_ancestors(block, wanted);
}

void EvictionOrder::raise_ancestors(BlockId block, const Retention &wanted) {
    do block = parent_of(block);
    while (block != kNullBlock && raise(block, wanted));
}

Retention EvictionOrder::retention(BlockId block) const {
    if (!is_on_) return {};
    const Fact &fact = facts_[block];
    return {fact.band, fact.ttl_until_ns, fact.pin_tenant, fact.ttl_ns};
}

const char *EvictionOrder::wrong_with(BlockId block, uint32_t num_published_children) const {
    const Fact &fact = facts_[block];
    if (fact.num_children != num_published_children) return "its count of children is wrong";
    bool is_placed = fact.place != kNowhere;
    if (is_placed != is_leaf(block)) return "it is a leaf that cannot be evicted, or the reverse";
    return nullptr;
}

}  // namespace pagemill::cache
