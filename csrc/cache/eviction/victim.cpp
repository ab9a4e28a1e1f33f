// Whose block goes: the tenant first, then the band, then the policy's rank.
#include <algorithm>

#include "cache/bug.hpp"
#include "cache/eviction/order.hpp"

namespace pagemill::cache {

void EvictionOrder::set_shares(uint32_t quota_blocks, bool is_fair) {
    if (index_.num_published() > 0) bug("set_shares: blocks are published already");
    has_shares_ = true;
    is_fair_ = is_fair;
    quota_blocks_ = quota_blocks;
    pin_budget_ = std::min(pin_budget_, std::max(1u, quota_blocks / 2));
    be_on();
}

void EvictionOrder::count(uint32_t tenant, int change) {
    if (!has_shares_) return;
    uint32_t &num = num_cached_[tenant];
    by_share_.erase({num, tenant});
    num = uint32_t(int64_t(num) + change);
    if (num > 0) by_share_.insert({num, tenant});
    else num_cached_.erase(tenant);
}

// The first of the lowest band that has any; of one tenant, or of all.
BlockId EvictionOrder::first_waiting(const WaitingByRanks &waiting, const uint32_t *tenant) {
    const std::pair<uint64_t, BlockId> *first = nullptr;
    uint8_t band = 0;
    for (const auto &[ranks, leaves] : waiting) {
        if (leaves.empty() || (tenant && ranks.second != *tenant)) continue;
        if (first && ranks.first > band) break;
        if (!first || *leaves.begin() < *first) first = &*leaves.begin();
        band = ranks.first;
    }
    return first ? first->second : kNullBlock;
}

BlockId EvictionOrder::victim_of(uint32_t tenant) {
    for (uint8_t band : bands_)
        if (auto found = ranked_.find({band, tenant}); found != ranked_.end())
            if (BlockId leaf = found->second->victim(); leaf != kNullBlock) return leaf;
    BlockId kept = first_waiting(kept_, &tenant);
    return kept != kNullBlock ? kept : first_waiting(pinned_, &tenant);
}

BlockId EvictionOrder::over_quota(uint32_t tenant) {
    auto found = num_cached_.find(tenant);
    if (!has_shares_ || found == num_cached_.end() || found->second <= quota_blocks_)
        return kNullBlock;
    return victim_of(tenant);
}

// Of the tenant that has most cached; where all of that is held, of the next.
BlockId EvictionOrder::victim_by_share() {
    for (auto share = by_share_.rbegin(); share != by_share_.rend(); ++share)
        if (BlockId leaf = victim_of(share->second); leaf != kNullBlock) return leaf;
    return kNullBlock;
}

BlockId EvictionOrder::victim() {
    if (!is_on_) return pool_.oldest();
    if (is_fair_) return victim_by_share();
    for (auto &[ranks, policy] : ranked_)
        if (BlockId leaf = policy->victim(); leaf != kNullBlock) return leaf;
    BlockId kept = first_waiting(kept_, nullptr);
    return kept != kNullBlock ? kept : first_waiting(pinned_, nullptr);
}

}  // namespace pagemill::cache
