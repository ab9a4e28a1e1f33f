#include "cache/bug.hpp"
#include "cache/eviction/policies.hpp"

namespace pagemill::cache {

struct Registered {
    const char *name;
    PolicyPointer (*make)(const PolicyConfig &);
};

static constexpr Registered kPolicies[] = {
    {"lru", make_lru},
    {"lfu", make_lfu},
    {"fifo", make_fifo},
    {"sieve", make_sieve},
    {"s3fifo", make_s3fifo},
    {"arc", make_arc},
    {"gdsf", make_gdsf},
    {"reuse_rank", make_reuse_rank},
    {"reuse_rank_strict", make_reuse_rank_strict},  // never loses 1 % in ten turnovers, gains less
    // for comparison; not offered to a server
    {"reuse_rank_plain", make_reuse_rank_plain},  // without its safety net
    {"tlru", make_tlru},
    {"lhd", make_lhd},
};

std::vector<std::string> eviction_policies() {
    std::vector<std::string> names;
    for (const Registered &policy : kPolicies) names.emplace_back(policy.name);
    return names;
}

MakePolicy find_policy(const std::string &name) {
    for (const Registered &policy : kPolicies)
        if (policy.name == name) return policy.make;
    bug("there is no eviction policy " + name);
}

}  // namespace pagemill::cache
