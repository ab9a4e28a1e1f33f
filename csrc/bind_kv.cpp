// KV of one layer group: writing, copying, attention. Python owns the memory.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "kernels/attention.hpp"
#include "kernels/ops.hpp"
#include "tensor_arg.hpp"

namespace nb = nanobind;
using pagemill::KvFormat;

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
    if (name == "fp32") return KvFormat::kFp32;
    if (name == "bf16") return KvFormat::kBf16;
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

class KvArena {
  public:
    KvArena(uintptr_t address, int64_t num_bytes, int64_t num_layers, int64_t num_blocks,
            int block_size, int num_kv_heads, int head_dim, const std::string &format)
        : num_layers_(num_layers) {
        require(head_dim > 0 && head_dim % 16 == 0, "the head dim must be a multiple of 16");
        require(block_size > 0 && block_size % pagemill::kGroupTokens == 0,
                "the block size must be a multiple of 16");
        require(num_kv_heads > 0 && num_blocks > 0 && num_layers > 0, "an empty arena");
        kv_.base = reinterpret_cast<uint8_t *>(address);
        kv_.num_blocks = num_blocks;
        kv_.num_kv_heads = num_kv_heads;
        kv_.head_dim = head_dim;
        kv_.block_size = block_size;
        kv_.format = parse_format(format);
        kv_.k_bytes =
            int64_t{head_dim} * pagemill::kGroupTokens * (kv_.format == KvFormat::kFp32 ? 4 : 2);
        kv_.group_bytes = 2 * kv_.k_bytes;
        kv_.tile_bytes = kv_.group_bytes * num_kv_heads * (block_size / pagemill::kGroupTokens);
        require(num_bytes == kv_.tile_bytes * num_blocks * num_layers,
                "the memory does not have the size of the arena");
    }

    int64_t tile_bytes() const { return kv_.tile_bytes; }

    void write(int64_t layer, ConstHeadRows k, ConstHeadRows v, Ints slots) const {
        require_rows(k, slots.size(), kv_.num_kv_heads, kv_.head_dim);
        require_rows(v, slots.size(), kv_.num_kv_heads, kv_.head_dim);
        pagemill::KvWrite write = make_write(layer, k.data(), v.data(), k.stride(0), slots);
        write.v_stride = v.stride(0);
        nb::gil_scoped_release release;
        pagemill::write_kv(write, static_cast<int64_t>(slots.size()));
    }

    // qkv [T, H + 2 K, D]: heads of q, of k, of v. q and k are rotated in place.
    void rotate_and_write(int64_t layer, Qkv qkv, ConstRows table, Ints positions, Ints slots,
                          std::optional<ConstFloats> query_norm,
                          std::optional<ConstFloats> key_norm, float eps) const {
        const int num_heads = static_cast<int>(qkv.shape(1)) - 2 * kv_.num_kv_heads;
        require(num_heads > 0 && qkv.shape(2) == static_cast<size_t>(kv_.head_dim),
                "qkv does not have the shape [tokens, query heads + 2 KV heads, head dim]");
        require(qkv.shape(0) == slots.size(), "there must be one slot a token");
        pagemill::Rotation rotation = {};
        rotation.stride = qkv.stride(0);
        rotation.num_heads = num_heads;
        rotation.num_kv_heads = kv_.num_kv_heads;
        rotation.head_dim = kv_.head_dim;
        rotation.q = qkv.data();
        rotation.k = rotation.q + num_heads * kv_.head_dim;
        rotation.q_norm = norm_data(query_norm);
        rotation.k_norm = norm_data(key_norm);
        rotation.norm_eps = eps;
        set_table(rotation, table, positions, slots.size());
        const float *v = rotation.k + kv_.num_kv_heads * kv_.head_dim;
        pagemill::KvWrite write = make_write(layer, rotation.k, v, rotation.stride, slots);
        nb::gil_scoped_release release;
        pagemill::rotate_and_write(rotation, write, static_cast<int64_t>(slots.size()));
    }

    void copy_blocks(Pairs pairs) const {
        require(pairs.shape(1) == 2, "copies are pairs of a source and a target");
        for (size_t i = 0; i < pairs.size(); ++i) {
            require(pairs.data()[i] >= 0 && pairs.data()[i] < kv_.num_blocks,
                    "a block id lies outside of the pool");
        }
        nb::gil_scoped_release release;
        pagemill::copy_blocks(kv_, num_layers_, kv_.num_blocks * kv_.tile_bytes, pairs.data(),
                              static_cast<int64_t>(pairs.shape(0)));
    }

    void attention(int64_t layer, ConstHeadRows q, HeadRows out, Ints query_start,
                   Ints context_start, Ints block_ids, Ints indptr, float scale, int64_t window,
                   float softcap) const {
        const size_t num_tokens = q.shape(0), num_sequences = context_start.size();
        const int num_heads = static_cast<int>(q.shape(1));
        require_rows(q, num_tokens, num_heads, kv_.head_dim);
        require_rows(out, num_tokens, num_heads, kv_.head_dim);
        require(num_heads > 0 && num_heads % kv_.num_kv_heads == 0,
                "the query heads must be a multiple of the KV heads");
        require(query_start.size() == num_sequences + 1 && indptr.size() == num_sequences + 1,
                "query_start and indptr need one entry more than context_start");
        require(window >= 0 && softcap >= 0, "window and softcap must not be negative");
        pagemill::SequenceBatch batch = {static_cast<int64_t>(num_sequences), query_start.data(),
                                         context_start.data(), block_ids.data(), indptr.data()};
        const char *wrong = pagemill::check_batch(batch, kv_, static_cast<int64_t>(num_tokens),
                                                  static_cast<int64_t>(block_ids.size()));
        require(!wrong, wrong);
        pagemill::AttentionCall call = {view(layer), q.data(),      out.data(),
                                        q.stride(0), out.stride(0), num_heads,
                                        scale,       softcap,       window};
        nb::gil_scoped_release release;
        pagemill::paged_attention(call, batch);
    }

  private:
    pagemill::KvView view(int64_t layer) const {
        require(layer >= 0 && layer < num_layers_, "the layer group has no such layer");
        pagemill::KvView kv = kv_;
        kv.base += layer * kv_.num_blocks * kv_.tile_bytes;
        return kv;
    }

    pagemill::KvWrite make_write(int64_t layer, const float *k, const float *v, int64_t stride,
                                 const Ints &slots) const {
        for (size_t i = 0; i < slots.size(); ++i) {
            require(slots.data()[i] >= 0 && slots.data()[i] / kv_.block_size < kv_.num_blocks,
                    "a slot lies outside of the pool");
        }
        return {view(layer), k, v, stride, stride, slots.data()};
    }

    void set_table(pagemill::Rotation &rotation, const ConstRows &table, const Ints &positions,
                   size_t num_tokens) const {
        const size_t width = table.shape(1);
        require(width % 2 == 0 && width <= static_cast<size_t>(kv_.head_dim),
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
        require(weight->size() == static_cast<size_t>(kv_.head_dim),
                "a norm of heads needs one weight a channel");
        return weight->data();
    }

    pagemill::KvView kv_ = {};
    int64_t num_layers_;
};

}  // namespace

void bind_kv(nb::module_ &m) {
    nb::class_<KvArena>(m, "KvArena")
        .def(nb::init<uintptr_t, int64_t, int64_t, int64_t, int, int, int, const std::string &>(),
             nb::arg("address"), nb::arg("num_bytes"), nb::arg("num_layers"), nb::arg("num_blocks"),
             nb::arg("block_size"), nb::arg("num_kv_heads"), nb::arg("head_dim"),
             nb::arg("kv_format"))
        .def_prop_ro("tile_bytes", &KvArena::tile_bytes)
        .def("write", &KvArena::write, nb::arg("layer"), nb::arg("k"), nb::arg("v"),
             nb::arg("slots"))
        .def("rotate_and_write", &KvArena::rotate_and_write, nb::arg("layer"), nb::arg("qkv"),
             nb::arg("table"), nb::arg("positions"), nb::arg("slots"), nb::arg("query_norm").none(),
             nb::arg("key_norm").none(), nb::arg("eps"))
        .def("copy_blocks", &KvArena::copy_blocks, nb::arg("pairs"))
        .def("attention", &KvArena::attention, nb::arg("layer"), nb::arg("q"), nb::arg("out"),
             nb::arg("query_start"), nb::arg("context_start"), nb::arg("block_ids"),
             nb::arg("indptr"), nb::arg("scale"), nb::arg("window"), nb::arg("softcap"));
}
