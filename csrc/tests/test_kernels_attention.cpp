// Attention against a plain double reference, every instruction set of this processor, memory that
// ends exactly where the arena and the arrays end.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "kernels/attention.hpp"
#include "kernels/ops.hpp"
#include "kernels/raw_groups.hpp"
#include "thread_pool.hpp"

using namespace pagemill;

namespace {

struct Span {
    int before, count;
};

struct Shape {
    int num_heads, num_kv_heads, head_dim, block_size;
    KvFormat format;
    int window;
    float softcap;
};

float round_to(KvFormat format, float x) {
    if (format != KvFormat::kBf16) return x;
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
    std::memcpy(&x, &bits, 4);
    return x;
}

// One sequence after another; K and V written through the kernels, kept plain beside them.
struct Case {
    Shape shape;
    std::vector<Span> spans;
    std::unique_ptr<uint8_t[]> arena;
    KvView kv = {};
    std::vector<std::vector<float>> keys, values;
    std::vector<int32_t> query_start{0}, context_start, block_ids, indptr{0}, tail_slots;
    std::vector<float> q;
    std::unique_ptr<uint8_t[]> tails, scratch;  // raw groups, where whole groups are coded

    Case(Shape asked, std::vector<Span> parts) : shape(asked), spans(std::move(parts)) {
        std::mt19937 random(7);
        std::normal_distribution<float> normal;
        int num_blocks = 1;
        for (Span span : spans) num_blocks += blocks_of(span);
        make_arena(num_blocks);
        for (Span span : spans) add(span, random, normal);
        q.resize(size_t(query_start.back()) * size_t(shape.num_heads * shape.head_dim));
        for (float &x : q) x = 2 * normal(random);
        if (codes_whole_groups(shape.format)) write_raw_steps();
    }

    // All tokens before the chunks in a step for each sequence, then one step of all chunks.
    void write_raw_steps() {
        const int width = shape.num_kv_heads * shape.head_dim;
        tails.reset(new uint8_t[size_t(raw_bytes(kv)) * spans.size()]);
        std::vector<float> k, v;
        for (size_t i = 0; i < spans.size(); ++i) {
            tail_slots.push_back(int32_t(spans.size() - 1 - i));
            const int32_t zero = 0, row_ends[2] = {0, spans[i].before};
            SequenceBatch one = {1, row_ends, &zero, block_ids.data(), &indptr[i], {}, {}};
            write_step(one, i, keys[i], values[i]);
            k.insert(k.end(), keys[i].begin() + spans[i].before * width, keys[i].end());
            v.insert(v.end(), values[i].begin() + spans[i].before * width, values[i].end());
        }
        SequenceBatch all = batch();
        write_step(all, 0, k, v);
    }

    void write_step(SequenceBatch &step, size_t first, const std::vector<float> &k,
                    const std::vector<float> &v) {
        const int width = shape.num_kv_heads * shape.head_dim;
        scratch.reset(new uint8_t[size_t(num_scratch_groups(step) * raw_bytes(kv))]);
        step.raw = {&tail_slots[first], tails.get(), scratch.get()};
        write_raw({kv, k.data(), v.data(), width, width, nullptr}, step);
    }

    int blocks_of(Span span) const {
        return (span.before + span.count + shape.block_size - 1) / shape.block_size;
    }

    void make_arena(int num_blocks) {
        kv.num_blocks = num_blocks;
        kv.num_kv_heads = shape.num_kv_heads;
        kv.head_dim = shape.head_dim;
        kv.block_size = shape.block_size;
        kv.format = shape.format;
        kv.bytes = group_bytes_of(shape.format, shape.head_dim);
        kv.group_bytes = kv.bytes.total();
        kv.tile_bytes = kv.group_bytes * shape.num_kv_heads * (shape.block_size / kGroupTokens);
        size_t num_bytes = size_t(kv.tile_bytes) * size_t(num_blocks);
        arena.reset(new uint8_t[num_bytes]);
        std::memset(arena.get(), 0xff, num_bytes);  // NaN in both formats
        kv.base = arena.get();
    }

    void add(Span span, std::mt19937 &random, std::normal_distribution<float> &normal) {
        const int length = span.before + span.count, width = shape.num_kv_heads * shape.head_dim;
        std::vector<float> k(size_t(length * width)), v(k.size());
        for (float &x : k) x = normal(random);
        for (float &x : v) x = normal(random);
        const int first = block_ids.empty() ? 0 : int(block_ids.size());
        for (int i = 0; i < blocks_of(span); ++i)
            block_ids.push_back(int32_t(kv.num_blocks - 1 - first - i));
        std::vector<int32_t> slots;
        for (int t = 0; t < length; ++t) {
            int32_t block = block_ids[size_t(first + t / shape.block_size)];
            slots.push_back(block * shape.block_size + t % shape.block_size);
        }
        if (!codes_whole_groups(shape.format)) {
            write_kv({kv, k.data(), v.data(), width, width, slots.data()}, length);
        }
        keys.push_back(std::move(k));
        values.push_back(std::move(v));
        query_start.push_back(query_start.back() + span.count);
        context_start.push_back(span.before);
        indptr.push_back(int32_t(block_ids.size()));
    }

    SequenceBatch batch() const {
        return {int64_t(spans.size()), query_start.data(), context_start.data(), block_ids.data(),
                indptr.data(), {tail_slots.data(), tails.get(), scratch.get()}, {}};
    }

    std::vector<float> run() const {
        std::vector<float> out(q.size());
        const int64_t width = int64_t{shape.num_heads} * shape.head_dim;
        AttentionCall call = {kv,   q.data(),      out.data(),  width, width, shape.num_heads,
                              0.2f, shape.softcap, shape.window, nullptr};
        paged_attention(call, batch());
        return out;
    }

    double score(size_t i, int row, int head, int t) const {
        const int dim = shape.head_dim, kv_head = head / (shape.num_heads / shape.num_kv_heads);
        const float *query =
            &q[size_t((query_start[i] + row) * shape.num_heads + head) * size_t(dim)];
        const float *key = &keys[i][size_t(t * shape.num_kv_heads + kv_head) * size_t(dim)];
        double sum = 0;
        for (int c = 0; c < dim; ++c) sum += double(query[c]) * round_to(shape.format, key[c]);
        sum *= 0.2f;
        return shape.softcap > 0 ? shape.softcap * std::tanh(sum / shape.softcap) : sum;
    }

    // Largest difference of one row and head to the plain sum.
    double error(const std::vector<float> &out, size_t i, int row, int head) const {
        const int dim = shape.head_dim, kv_head = head / (shape.num_heads / shape.num_kv_heads);
        const int position = spans[i].before + row;
        const int begin = shape.window ? std::max(0, position - shape.window + 1) : 0;
        std::vector<double> weights, want(size_t(dim), 0.0);
        double top = -std::numeric_limits<double>::infinity(), total = 0, worst = 0;
        for (int t = begin; t <= position; ++t) weights.push_back(score(i, row, head, t));
        for (double w : weights) top = std::max(top, w);
        for (double &w : weights) total += w = std::exp(w - top);
        for (int t = begin; t <= position; ++t) {
            const float *value = &values[i][size_t(t * shape.num_kv_heads + kv_head) * size_t(dim)];
            for (int c = 0; c < dim; ++c) {
                want[size_t(c)] +=
                    weights[size_t(t - begin)] / total * round_to(shape.format, value[c]);
            }
        }
        const float *got =
            &out[size_t((query_start[i] + row) * shape.num_heads + head) * size_t(dim)];
        for (int c = 0; c < dim; ++c) {
            const double difference = std::abs(got[c] - want[size_t(c)]);
            if (!(difference <= worst)) worst = difference;  // NaN too
        }
        return worst;
    }
};

// On matrix tiles a float32 is the sum of two bfloat16: 2^-18 of it is lost.
void check_case(const Case &c, double most = 2e-5) {
    if (!std::strcmp(isa_name(), "amx")) most = std::max(most, 6e-5);
    std::vector<float> out = c.run();
    for (size_t i = 0; i < c.spans.size(); ++i) {
        for (int row = 0; row < c.spans[i].count; ++row) {
            for (int head = 0; head < c.shape.num_heads; ++head) {
                CHECK(c.error(out, i, row, head) < most);
            }
        }
    }
}

template <typename Fn>
void on_each_isa(Fn fn) {
    for (int i = 0; const char *name = available_isa(i); ++i) {
        CHECK(set_isa(name));
        fn();
    }
    set_isa("auto");
}

const std::vector<Span> kMix = {{0, 1},  {0, 19}, {15, 1},  {16, 1},
                                {63, 2}, {64, 3}, {530, 1}, {600, 20}};

}  // namespace

TEST(attention_equals_the_plain_sum) {
    for (KvFormat format : {KvFormat::kFp32, KvFormat::kBf16}) {
        for (Shape shape :
             {Shape{3, 1, 16, 16, format, 0, 0}, Shape{4, 4, 48, 32, format, 0, 0},
              Shape{7, 1, 64, 16, format, 0, 0}, Shape{10, 2, 80, 64, format, 0, 0}}) {
            Case c(shape, kMix);
            on_each_isa([&] { check_case(c); });
        }
    }
}

// Rough bounds: tests/kernels compares the bytes and the sums exactly. Here no byte outside of the
// arrays may be touched, and no NaN behind the end may come through.
TEST(attention_over_coded_tiles) {
    for (KvFormat format : {KvFormat::kI8, KvFormat::kF8, KvFormat::kK8v4, KvFormat::kI4c}) {
        for (Shape shape :
             {Shape{3, 1, 16, 16, format, 0, 0}, Shape{4, 4, 48, 32, format, 17, 0},
              Shape{7, 1, 64, 16, format, 0, 3.0f}, Shape{10, 2, 80, 64, format, 513, 0},
              Shape{4, 1, 128, 16, format, 0, 0}}) {
            on_each_isa([&] { check_case(Case(shape, kMix), 1.0); });
        }
    }
}

TEST(attention_with_windows_and_softcap) {
    for (KvFormat format : {KvFormat::kFp32, KvFormat::kBf16}) {
        for (int window : {1, 17, 64, 513}) {
            Case c({2, 1, 32, 16, format, window, window == 17 ? 3.0f : 0.0f}, kMix);
            on_each_isa([&] { check_case(c); });
        }
    }
}

TEST(attention_gives_the_same_bits_on_any_number_of_threads) {
    Case c({4, 2, 32, 16, KvFormat::kBf16, 0, 0}, {{3000, 1}, {0, 200}, {1500, 40}});
    std::vector<float> first;
    for (int count : {1, 2, 3, 7}) {
        set_num_threads(count);
        std::vector<float> out = c.run();
        if (first.empty()) first = out;
        CHECK(!std::memcmp(first.data(), out.data(), out.size() * sizeof(float)));
    }
    set_num_threads(2);
}

TEST(attention_refuses_what_leads_outside) {
    Case c({1, 1, 16, 16, KvFormat::kFp32, 0, 0}, {{20, 2}, {5, 1}});
    auto verdict = [&] { return check_batch(c.batch(), c.kv, 3, int64_t(c.block_ids.size())); };
    CHECK(!verdict());
    c.block_ids[1] = int32_t(c.kv.num_blocks);
    CHECK(verdict());
    c.block_ids[1] = 1;
    c.context_start[0] = 31;
    CHECK(verdict());
    c.context_start[0] = std::numeric_limits<int32_t>::max();
    CHECK(verdict());
    c.context_start[0] = 20;
    c.indptr[1] = -5;
    CHECK(verdict());
}
