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

BlockId EvictionOrder::victim_of(uint32_t line) {
    for (uint8_t band : bands_)
        if (auto found = ranked_.find({band, line}); found != ranked_.end())
            if (BlockId leaf = found->second->victim(); leaf != kNullBlock) return leaf;
    for (const auto *waiting : {&kept_, &pinned_})
        if (auto found = waiting->find(line); found != waiting->end() && !found->second.empty())
            return std::get<2>(*found->second.begin());
    return kNullBlock;
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
    return is_fair_ ? victim_by_share() : victim_of(kEverybody);
}

}  // namespace pagemill::cache
