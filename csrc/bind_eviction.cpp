#include "bind_eviction.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cache/bug.hpp"
#include "cache/eviction/callback.hpp"
#include "cache/replay.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace pagemill::cache;

namespace {

template <typename T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::span<const T> view(const Array<T> &array) {
    return {array.data(), array.size()};
}

nb::object to_numpy(std::vector<int32_t> &&values) {
    auto *owned = new std::vector<int32_t>(std::move(values));
    nb::capsule owner(owned, [](void *pointer) noexcept {
        delete static_cast<std::vector<int32_t> *>(pointer);
    });
    return nb::cast(nb::ndarray<nb::numpy, int32_t, nb::ndim<1>>(owned->data(), {owned->size()},
                                                                 owner));
}

Requests requests_of(const Array<uint32_t> &token_ids, const Array<int64_t> &start,
                     const Array<int64_t> &times_ns, const Array<uint8_t> &has_tool_calls,
                     bool add_last_token) {
    size_t num = times_ns.size();
    if (start.size() != num + 1 || has_tool_calls.size() != num)
        bug("replay: one start more than times, and as many marks of tool calls as times");
    for (size_t i = 0; i < num; ++i)
        if (start(i) > start(i + 1)) bug("replay: the starts must not go back");
    if (start(0) < 0 || uint64_t(start(num)) > token_ids.size())
        bug("replay: the starts lie outside of the token ids");
    return {view(token_ids), view(start), view(times_ns), view(has_tool_calls), add_last_token};
}

// The calls hold the interpreter lock themselves: a replay runs without it.
PolicyCallbacks callbacks_of(nb::object policy, uint32_t group) {
    PolicyCallbacks calls;
    calls.touch = [=](BlockId block, Key key, uint32_t position, uint64_t now, bool is_new) {
        nb::gil_scoped_acquire lock;
        policy.attr("touch")(group, block, key, position, now, is_new);
    };
    calls.rank = [=](BlockId block, uint64_t now) {
        nb::gil_scoped_acquire lock;
        return nb::cast<double>(policy.attr("rank")(group, block, now));
    };
    calls.drop = [=](BlockId block) {
        nb::gil_scoped_acquire lock;
        policy.attr("drop")(group, block);
    };
    return calls;
}

void set_policy(CacheCore &core, nb::object policy) {
    for (uint32_t g = 0; g < core.num_groups(); ++g)
        core.group(g).order.set_policy([policy, g](const PolicyConfig &config) {
            return std::make_unique<CallbackPolicy>(config, callbacks_of(policy, g));
        });
}

void bind_retention(nb::class_<CacheCore> &core) {
    core.def("advance", &CacheCore::advance, "now_ns"_a)
        .def("set_policy", &set_policy, "policy"_a)
        .def("set_retention", [](CacheCore &core, uint32_t group, BlockId block, int band,
                                 uint64_t ttl_until_ns, uint32_t pin_tenant) {
            if (block >= core.group(group).pool.num_blocks()) bug("set_retention: no such block");
            if (band < 0 || band >= Retention::kNumBands) bug("set_retention: a band is 0 to 100");
            core.group(group).order.set_retention(block, {uint8_t(band), ttl_until_ns, pin_tenant});
        }, "group"_a, "block"_a, "band"_a, "ttl_until_ns"_a, "pin_tenant"_a)
        .def("retention", [](CacheCore &core, uint32_t group, BlockId block) {
            Retention found = core.group(group).order.retention(block);
            return nb::make_tuple(found.band, found.ttl_until_ns, found.pin_tenant);
        }, "group"_a, "block"_a)
        .def("set_pin_budget", [](CacheCore &core, uint32_t group, uint32_t num_blocks) {
            core.group(group).order.set_pin_budget(num_blocks);
        }, "group"_a, "num_blocks"_a)
        .def("num_dropped_pins", [](CacheCore &core, uint32_t group) {
            return core.group(group).order.num_dropped_pins();
        }, "group"_a);
}

}  // namespace

void bind_eviction(nb::module_ &m, nb::class_<CacheCore> &core) {
    bind_retention(core);
    core.def("replay", [](CacheCore &core, Array<uint32_t> token_ids, Array<int64_t> start,
                          Array<int64_t> times_ns, Array<uint8_t> has_tool_calls,
                          bool add_last_token) {
        Requests requests = requests_of(token_ids, start, times_ns, has_tool_calls, add_last_token);
        std::vector<int32_t> hits;
        {
            nb::gil_scoped_release unlocked;
            hits = replay(core, requests);
        }
        return to_numpy(std::move(hits));
    }, "token_ids"_a, "start"_a, "times_ns"_a, "has_tool_calls"_a, "add_last_token"_a);
    m.def("clairvoyant_hits", [](Array<uint32_t> token_ids, Array<int64_t> start,
                                 Array<int64_t> times_ns, Array<uint8_t> has_tool_calls,
                                 uint32_t capacity) {
        Requests requests = requests_of(token_ids, start, times_ns, has_tool_calls, false);
        std::vector<int32_t> hits;
        {
            nb::gil_scoped_release unlocked;
            hits = clairvoyant_hits(requests, capacity);
        }
        return to_numpy(std::move(hits));
    }, "token_ids"_a, "start"_a, "times_ns"_a, "has_tool_calls"_a, "capacity"_a);
    m.def("use_intervals", [](Array<uint32_t> token_ids, Array<int64_t> start,
                              Array<int64_t> times_ns, Array<uint8_t> has_tool_calls,
                              size_t num_warmup, uint32_t max_blocks) {
        Requests requests = requests_of(token_ids, start, times_ns, has_tool_calls, false);
        UseIntervals found;
        {
            nb::gil_scoped_release unlocked;
            found = use_intervals(requests, num_warmup, max_blocks);
        }
        return nb::make_tuple(to_numpy(std::move(found.first)), to_numpy(std::move(found.last)),
                              to_numpy(std::move(found.position)),
                              to_numpy(std::move(found.num_blocks)));
    }, "token_ids"_a, "start"_a, "times_ns"_a, "has_tool_calls"_a, "num_warmup"_a, "max_blocks"_a);
    m.def("eviction_policies", &eviction_policies);
}
