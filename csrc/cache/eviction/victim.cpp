// Whose block goes: the tenant first, then the band, then the policy's rank.
#include "cache/bug.hpp"
#include "cache/eviction/order.hpp"

namespace pagemill::cache {

void EvictionOrder::set_shares(uint32_t quota_blocks, bool is_fair) {
    if (index_.num_published() > 0) bug("set_shares: blocks are published already");
    has_shares_ = true;
    is_fair_ = is_fair;
    quota_blocks_ = quota_blocks;
    be_on();
}

void EvictionOrder::count_less(uint32_t tenant) {
    auto found = num_cached_.find(tenant);
    if (--found->second == 0) num_cached_.erase(found);
}

// The lowest ranked leaf of one tenant; kNullBlock where it has none.
BlockId EvictionOrder::victim_of(uint32_t tenant) {
    for (auto &[place, policy] : ranked_)
        if (place.second == tenant)
            if (BlockId leaf = policy->victim(); leaf != kNullBlock) return leaf;
    return kNullBlock;
}

BlockId EvictionOrder::over_quota(uint32_t tenant) {
    auto found = num_cached_.find(tenant);
    if (!has_shares_ || found == num_cached_.end() || found->second <= quota_blocks_)
        return kNullBlock;
    return victim_of(tenant);
}

// A tenant that has more than its equal part of what is cached, the largest first. Of equal ones
// that with the smaller number, which came first.
BlockId EvictionOrder::victim_by_share() {
    const uint64_t num_tenants = num_cached_.size();
    std::map<std::pair<uint64_t, uint32_t>, uint32_t> largest_first;
    uint64_t sum = 0;
    for (auto [tenant, count] : num_cached_) sum += count;
    for (auto [tenant, count] : num_cached_)
        if (count * num_tenants > sum) largest_first[{sum - count, tenant}] = tenant;
    for (auto &[order, tenant] : largest_first)
        if (BlockId leaf = victim_of(tenant); leaf != kNullBlock) return leaf;
    return kNullBlock;
}

BlockId EvictionOrder::victim() {
    if (!is_on_) return pool_.oldest();
    if (is_fair_ && num_cached_.size() > 1)
        if (BlockId leaf = victim_by_share(); leaf != kNullBlock) return leaf;
    for (auto &[place, policy] : ranked_)
        if (BlockId leaf = policy->victim(); leaf != kNullBlock) return leaf;
    for (auto *waiting : {&kept_, &pinned_})
        for (auto &[band, leaves] : *waiting)
            if (!leaves.empty()) return leaves.begin()->second;
    return kNullBlock;
}

}  // namespace pagemill::cache
