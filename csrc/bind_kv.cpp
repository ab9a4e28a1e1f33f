// KV of one layer group: writing, copying, attention. Python owns the memory.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "kernels/attention.hpp"
#include "kernels/ops.hpp"
#include "kernels/raw_groups.hpp"
#include "tensor_arg.hpp"

namespace nb = nanobind;
using pagemill::KvFormat;
using pagemill::KvView;

namespace {

using pagemill::TensorArg;
using HeadRows = TensorArg<float, 3, true>;
using ConstHeadRows = TensorArg<const float, 3, true>;
using Qkv = TensorArg<float, 3>;
using ConstRows = TensorArg<const float, 2>;
using ConstFloats = TensorArg<const float, 1>;
using Ints = TensorArg<const int32_t, 1>;
using Pairs = TensorArg<const int64_t, 2>;

void require(bool condition, const char *words) {
    if (!condition) throw nb::value_error(words);
}

KvFormat parse_format(const std::string &name) {
    constexpr const char *kNames[] = {"fp32", "bf16", "i8", "f8", "k8v4", "i4c"};
    for (int i = 0; i < 6; ++i) {
        if (name == kNames[i]) return static_cast<KvFormat>(i);
    }
    throw nb::value_error(("unknown KV format " + name).c_str());
}

// [T, num_heads, D] with the heads of a token side by side; tokens may lie apart.
template <typename Array>
void require_rows(const Array &x, size_t num_tokens, int num_heads, int head_dim) {
    require(x.shape(0) == num_tokens && x.shape(1) == static_cast<size_t>(num_heads) &&
                x.shape(2) == static_cast<size_t>(head_dim),
            "q, k or v does not have the shape [tokens, heads, head dim] of this cache");
    require(!num_tokens || (x.stride(2) == 1 && (num_heads == 1 || x.stride(1) == head_dim)),
            "the heads of a token must lie side by side in memory");
}

// The sequences of a step as arrays, tail slots where a format codes whole groups.
struct StepArrays {
    Ints query_start, context_start, block_ids, indptr;
    std::optional<Ints> tail_slots, runs, members, run_indptr;
};

class KvArena {
  public:
    KvArena(uintptr_t address, int64_t num_bytes, const std::vector<std::string> &kv_formats,
            int64_t num_blocks, int block_size, int num_kv_heads, int head_dim)
        : num_blocks_(num_blocks), block_size_(block_size), num_kv_heads_(num_kv_heads),
          head_dim_(head_dim) {
        require(head_dim > 0 && head_dim % 16 == 0, "the head dim must be a multiple of 16");
        require(head_dim <= pagemill::kMaxHeadDim, "the head dim must be at most 512");
        require(block_size > 0 && block_size % pagemill::kGroupTokens == 0,
                "the block size must be a multiple of 16");
        require(num_kv_heads > 0 && num_blocks > 0 && !kv_formats.empty(), "an empty arena");
        auto *base = reinterpret_cast<uint8_t *>(address);
        for (const std::string &name : kv_formats) {
            layers_.push_back(make_view(base, parse_format(name)));
            base += layers_.back().tile_bytes * num_blocks;
        }
        require(base - num_bytes == reinterpret_cast<uint8_t *>(address),
                "the memory does not have the size of the arena");
        centers_.resize(kv_formats.size());
        tails_.resize(kv_formats.size());
    }

    std::vector<int64_t> tile_bytes() const {
        std::vector<int64_t> sizes;
        for (const KvView &kv : layers_) sizes.push_back(kv.tile_bytes);
        return sizes;
    }

    // What is taken off every key of a layer: [K heads * D].
    void set_center(int64_t layer, ConstFloats center) {
        require(layer >= 0 && layer < static_cast<int64_t>(layers_.size()),
                "the layer group has no such layer");
        KvView &kv = layers_[static_cast<size_t>(layer)];
        require(center.size() == static_cast<size_t>(num_kv_heads_ * head_dim_),
                "a center needs one number a KV head and channel");
        auto &kept = centers_[static_cast<size_t>(layer)];
        kept.assign(center.data(), center.data() + center.size());
        kv.centers = kept.data();
    }

    // Memory of a layer for `num_tails` raw groups.
    void set_tails(int64_t layer, uintptr_t address, int64_t num_bytes, int64_t num_tails) {
        const KvView &kv = layers_.at(static_cast<size_t>(layer));
        require(num_tails >= 0 && num_bytes == num_tails * pagemill::raw_bytes(kv),
                "the memory does not have the size of the tail slots");
        tails_[static_cast<size_t>(layer)] = reinterpret_cast<uint8_t *>(address);
        num_tails_ = num_tails;
    }

    void write(int64_t layer, ConstHeadRows k, ConstHeadRows v, Ints slots) const {
        require_rows(k, slots.size(), num_kv_heads_, head_dim_);
        require_rows(v, slots.size(), num_kv_heads_, head_dim_);
        pagemill::KvWrite write = make_write(layer, k.data(), v.data(), k.stride(0), slots);
        write.v_stride = v.stride(0);
        require(!pagemill::codes_whole_groups(write.kv.format),
                "this format codes whole groups: write the step with its sequences");
        nb::gil_scoped_release release;
        pagemill::write_kv(write, static_cast<int64_t>(slots.size()));
    }

    // K and V of a step for formats that code whole groups.
    void write_step(int64_t layer, ConstHeadRows k, ConstHeadRows v, Ints query_start,
                    Ints context_start, Ints block_ids, Ints indptr,
                    std::optional<Ints> tail_slots) {
        require_rows(k, k.shape(0), num_kv_heads_, head_dim_);
        require_rows(v, k.shape(0), num_kv_heads_, head_dim_);
        const KvView kv = view(layer);
        require(pagemill::codes_whole_groups(kv.format), "this format is written by slots");
        const StepArrays step = {query_start, context_start, block_ids, indptr,
                                 tail_slots,  {},            {},        {}};
        const pagemill::SequenceBatch batch = checked(layer, step, k.shape(0));
        const pagemill::KvWrite write = {kv, k.data(), v.data(), k.stride(0), v.stride(0), nullptr};
        nb::gil_scoped_release release;
        pagemill::write_raw(write, batch);
    }

    // qkv [T, H + 2 K, D]: heads of q, of k, of v. q and k are rotated in place.
    void rotate_and_write(int64_t layer, Qkv qkv, ConstRows table, Ints positions, Ints slots,
                          std::optional<ConstFloats> query_norm,
                          std::optional<ConstFloats> key_norm, float eps) const {
        require(qkv.shape(0) == slots.size(), "there must be one slot a token");
        const pagemill::Rotation rotation =
            make_rotation(qkv, table, positions, query_norm, key_norm, eps);
        const float *v = rotation.k + num_kv_heads_ * head_dim_;
        pagemill::KvWrite write = make_write(layer, rotation.k, v, rotation.stride, slots);
        const auto num_tokens = static_cast<int64_t>(slots.size());
        const bool is_raw = pagemill::codes_whole_groups(write.kv.format);
        nb::gil_scoped_release release;
        if (is_raw) return pagemill::rotate(rotation, num_tokens);
        pagemill::rotate_and_write(rotation, write, num_tokens);
    }

    void copy_blocks(Pairs pairs) const {
        require_pairs(pairs, num_blocks_, "a block id lies outside of the pool");
        nb::gil_scoped_release release;
        pagemill::copy_blocks(layers_, pairs.data(), static_cast<int64_t>(pairs.shape(0)));
    }

    void copy_tails(Pairs pairs) const {
        require_pairs(pairs, num_tails_, "a tail slot lies outside of its pool");
        for (size_t layer = 0; layer < layers_.size(); ++layer) {
            const auto size = static_cast<size_t>(pagemill::raw_bytes(layers_[layer]));
            if (!tails_[layer]) continue;
            for (size_t i = 0; i < pairs.shape(0); ++i) {
                const int64_t from = pairs.data()[2 * i], to = pairs.data()[2 * i + 1];
                std::memmove(tails_[layer] + static_cast<size_t>(to) * size,
                             tails_[layer] + static_cast<size_t>(from) * size, size);
            }
        }
    }

    void attention(int64_t layer, ConstHeadRows q, HeadRows out, Ints query_start,
                   Ints context_start, Ints block_ids, Ints indptr, float scale, int64_t window,
                   float softcap, std::optional<ConstFloats> sinks,
                   std::optional<Ints> tail_slots, std::optional<Ints> runs,
                   std::optional<Ints> members, std::optional<Ints> run_indptr) {
        const size_t num_tokens = q.shape(0);
        const int num_heads = static_cast<int>(q.shape(1));
        require_rows(q, num_tokens, num_heads, head_dim_);
        require_rows(out, num_tokens, num_heads, head_dim_);
        require(num_heads > 0 && num_heads % num_kv_heads_ == 0,
                "the query heads must be a multiple of the KV heads");
        require(window >= 0 && softcap >= 0, "window and softcap must not be negative");
        require(!sinks || sinks->size() == static_cast<size_t>(num_heads),
                "sinks need one number a query head");
        const StepArrays step = {query_start, context_start, block_ids, indptr,
                                 tail_slots,  runs,          members,   run_indptr};
        const pagemill::SequenceBatch batch = checked(layer, step, num_tokens);
        const pagemill::AttentionCall call = {
            view(layer), q.data(), out.data(), q.stride(0), out.stride(0),
            num_heads,   scale,    softcap,    window,      sinks ? sinks->data() : nullptr};
        nb::gil_scoped_release release;
        pagemill::paged_attention(call, batch);
    }

  private:
    KvView make_view(uint8_t *base, KvFormat format) const {
        KvView kv = {};
        kv.base = base;
        kv.num_blocks = num_blocks_;
        kv.num_kv_heads = num_kv_heads_;
        kv.head_dim = head_dim_;
        kv.block_size = block_size_;
        kv.format = format;
        kv.bytes = pagemill::group_bytes_of(format, head_dim_);
        kv.group_bytes = kv.bytes.total();
        kv.tile_bytes = kv.group_bytes * num_kv_heads_ * (block_size_ / pagemill::kGroupTokens);
        return kv;
    }

    KvView view(int64_t layer) const {
        require(layer >= 0 && layer < static_cast<int64_t>(layers_.size()),
                "the layer group has no such layer");
        return layers_[static_cast<size_t>(layer)];
    }

    static void require_pairs(const Pairs &pairs, int64_t end, const char *words) {
        require(pairs.shape(1) == 2, "copies are pairs of a source and a target");
        for (size_t i = 0; i < pairs.size(); ++i) {
            require(pairs.data()[i] >= 0 && pairs.data()[i] < end, words);
        }
    }

    // The batch of a step, where nothing points outside; with memory for its raw groups.
    pagemill::SequenceBatch checked(int64_t layer, const StepArrays &step, size_t num_tokens) {
        const size_t num_sequences = step.context_start.size();
        require(step.query_start.size() == num_sequences + 1 &&
                    step.indptr.size() == num_sequences + 1,
                "query_start and indptr need one entry more than context_start");
        pagemill::SequenceBatch batch = {static_cast<int64_t>(num_sequences),
                                         step.query_start.data(),
                                         step.context_start.data(),
                                         step.block_ids.data(),
                                         step.indptr.data(),
                                         {},
                                         shared_runs(step)};
        const KvView kv = view(layer);
        const char *wrong =
            pagemill::check_batch(batch, kv, static_cast<int64_t>(num_tokens),
                                  static_cast<int64_t>(step.block_ids.size()));
        require(!wrong, wrong);
        if (!pagemill::codes_whole_groups(kv.format)) return batch;
        require(step.tail_slots && step.tail_slots->size() == num_sequences,
                "this format needs a tail slot for each sequence");
        std::vector<bool> is_taken(static_cast<size_t>(num_tails_));
        for (size_t i = 0; i < num_sequences; ++i) {
            const int32_t slot = step.tail_slots->data()[i];
            require(slot >= 0 && slot < num_tails_, "a tail slot lies outside of its pool");
            require(!is_taken[static_cast<size_t>(slot)], "two sequences have one tail slot");
            is_taken[static_cast<size_t>(slot)] = true;
        }
        const int64_t size = pagemill::num_scratch_groups(batch) * pagemill::raw_bytes(kv);
        if (static_cast<int64_t>(raw_.size()) < size) raw_.resize(static_cast<size_t>(size));
        batch.raw = {step.tail_slots->data(), tails_[static_cast<size_t>(layer)], raw_.data()};
        return batch;
    }

    static pagemill::SharedRuns shared_runs(const StepArrays &step) {
        if (!step.runs) return {};
        const size_t num_runs = step.runs->size() / 2;
        require(step.runs->size() % 2 == 0, "shared runs are pairs of a first entry and a count");
        require(step.members && step.run_indptr && step.run_indptr->size() == num_runs + 1,
                "shared runs need their members");
        const int32_t *indptr = step.run_indptr->data();
        require(indptr[0] == 0 && indptr[num_runs] == int32_t(step.members->size()),
                "the members of shared runs do not fit their count");
        for (size_t i = 0; i < num_runs; ++i) {
            require(indptr[i] <= indptr[i + 1], "the members of shared runs descend");
        }
        return {int64_t(num_runs), step.runs->data(), step.members->data(), indptr};
    }

    pagemill::KvWrite make_write(int64_t layer, const float *k, const float *v, int64_t stride,
                                 const Ints &slots) const {
        for (size_t i = 0; i < slots.size(); ++i) {
            require(slots.data()[i] >= 0 && slots.data()[i] / block_size_ < num_blocks_,
                    "a slot lies outside of the pool");
        }
        return {view(layer), k, v, stride, stride, slots.data()};
    }

    pagemill::Rotation make_rotation(const Qkv &qkv, const ConstRows &table, const Ints &positions,
                                     const std::optional<ConstFloats> &query_norm,
                                     const std::optional<ConstFloats> &key_norm,
                                     float eps) const {
        const int num_heads = static_cast<int>(qkv.shape(1)) - 2 * num_kv_heads_;
        require(num_heads > 0 && qkv.shape(2) == static_cast<size_t>(head_dim_),
                "qkv does not have the shape [tokens, query heads + 2 KV heads, head dim]");
        pagemill::Rotation rotation = {};
        rotation.stride = qkv.stride(0);
        rotation.num_heads = num_heads;
        rotation.num_kv_heads = num_kv_heads_;
        rotation.head_dim = head_dim_;
        rotation.q = qkv.data();
        rotation.k = rotation.q + num_heads * head_dim_;
        rotation.q_norm = norm_data(query_norm);
        rotation.k_norm = norm_data(key_norm);
        rotation.norm_eps = eps;
        set_table(rotation, table, positions, qkv.shape(0));
        return rotation;
    }

    void set_table(pagemill::Rotation &rotation, const ConstRows &table, const Ints &positions,
                   size_t num_tokens) const {
        const size_t width = table.shape(1);
        require(width % 2 == 0 && width <= static_cast<size_t>(head_dim_),
                "the table of angles must be even and at most the head dim wide");
        require(positions.size() == num_tokens, "there must be one position a token");
        for (size_t i = 0; i < num_tokens; ++i) {
            require(positions.data()[i] >= 0 &&
                        positions.data()[i] < static_cast<int64_t>(table.shape(0)),
                    "a position lies outside of the table of angles");
        }
        rotation.table = table.data();
        rotation.rotary_dim = static_cast<int>(width);
        rotation.positions = positions.data();
    }

    const float *norm_data(const std::optional<ConstFloats> &weight) const {
        if (!weight) return nullptr;
        require(weight->size() == static_cast<size_t>(head_dim_),
                "a norm of heads needs one weight a channel");
        return weight->data();
    }

    int64_t num_blocks_;
    int block_size_, num_kv_heads_, head_dim_;
    std::vector<KvView> layers_;
    std::vector<std::vector<float>> centers_;
    std::vector<uint8_t *> tails_;
    int64_t num_tails_ = 0;
    std::vector<uint8_t> raw_;  // raw groups of a step, from its writing to its reading
};

}  // namespace

void bind_kv(nb::module_ &m) {
    nb::class_<KvArena>(m, "KvArena")
        .def(nb::init<uintptr_t, int64_t, const std::vector<std::string> &, int64_t, int, int,
                      int>(),
             nb::arg("address"), nb::arg("num_bytes"), nb::arg("kv_formats"),
             nb::arg("num_blocks"), nb::arg("block_size"), nb::arg("num_kv_heads"),
             nb::arg("head_dim"))
        .def_prop_ro("tile_bytes", &KvArena::tile_bytes)
        .def("write", &KvArena::write, nb::arg("layer"), nb::arg("k"), nb::arg("v"),
             nb::arg("slots"))
        .def("rotate_and_write", &KvArena::rotate_and_write, nb::arg("layer"), nb::arg("qkv"),
             nb::arg("table"), nb::arg("positions"), nb::arg("slots"), nb::arg("query_norm").none(),
             nb::arg("key_norm").none(), nb::arg("eps"))
        .def("write_step", &KvArena::write_step, nb::arg("layer"), nb::arg("k"), nb::arg("v"),
             nb::arg("query_start"), nb::arg("context_start"), nb::arg("block_ids"),
             nb::arg("indptr"), nb::arg("tail_slots").none())
        .def("set_center", &KvArena::set_center, nb::arg("layer"), nb::arg("center"))
        .def("set_tails", &KvArena::set_tails, nb::arg("layer"), nb::arg("address"),
             nb::arg("num_bytes"), nb::arg("num_tails"))
        .def("copy_blocks", &KvArena::copy_blocks, nb::arg("pairs"))
        .def("copy_tails", &KvArena::copy_tails, nb::arg("pairs"))
        .def("attention", &KvArena::attention, nb::arg("layer"), nb::arg("q"), nb::arg("out"),
             nb::arg("query_start"), nb::arg("context_start"), nb::arg("block_ids"),
             nb::arg("indptr"), nb::arg("scale"), nb::arg("window"), nb::arg("softcap"),
             nb::arg("sinks").none(), nb::arg("tail_slots").none(), nb::arg("runs").none(),
             nb::arg("members").none(), nb::arg("run_indptr").none());
}
