// Norms, activations, products, decoding and the pool: odd sizes, memory that ends exactly at the
// end.
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "kernels/gguf_decode.hpp"
#include "kernels/ops.hpp"
#include "thread_pool.hpp"

using namespace pagemill;

namespace {

std::vector<float> random_floats(size_t count, float scale = 1) {
    std::mt19937 random(static_cast<unsigned>(count));
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (float &x : values) x = scale * normal(random);
    return values;
}

template <typename Fn>
void on_each_isa(Fn fn) {
    for (int i = 0; const char *name = available_isa(i); ++i) {
        CHECK(set_isa(name));
        fn();
    }
    set_isa("auto");
}

bool near(float got, double want) { return std::abs(got - want) <= 1e-5 * (1 + std::abs(want)); }

void check_norm(int64_t n) {
    std::vector<float> x = random_floats(size_t(3 * n), 2), weight = random_floats(size_t(n));
    std::vector<float> out(x.size());
    rms_norm(x.data(), weight.data(), 1e-5f, n, out.data(), 3);
    for (int64_t t = 0; t < 3; ++t) {
        double squares = 0;
        for (int64_t i = 0; i < n; ++i)
            squares += double(x[size_t(t * n + i)]) * x[size_t(t * n + i)];
        const double factor = 1 / std::sqrt(squares / double(n) + 1e-5);
        for (int64_t i = 0; i < n; ++i) {
            CHECK(near(out[size_t(t * n + i)], x[size_t(t * n + i)] * factor * weight[size_t(i)]));
        }
    }
}

void check_activation(int64_t n) {
    std::vector<float> x = random_floats(size_t(4 * n), 6), silu(size_t(2 * n)),
                       gelu(size_t(2 * n));
    activate(Activation::kSilu, x.data(), n, silu.data(), 2);
    activate(Activation::kGeluTanh, x.data(), n, gelu.data(), 2);
    for (int64_t i = 0; i < 2 * n; ++i) {
        const double gate = x[size_t(i / n * 2 * n + i % n)],
                     up = x[size_t(i / n * 2 * n + n + i % n)];
        CHECK(near(silu[size_t(i)], gate / (1 + std::exp(-gate)) * up));
        const double inner = std::sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate);
        CHECK(near(gelu[size_t(i)], gate / 2 * (1 + std::tanh(inner)) * up));
    }
}

void check_linear(int64_t num_tokens, int64_t num_rows, int64_t k) {
    std::vector<float> x = random_floats(size_t(num_tokens * k)), plain(size_t(num_rows * k));
    std::vector<uint16_t> w;
    for (float value : random_floats(size_t(num_rows * k) + 1)) {
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        w.push_back(static_cast<uint16_t>(bits >> 16));
    }
    w.pop_back();
    w.shrink_to_fit();
    widen_bf16(w.data(), plain.data(), num_rows * k);
    std::vector<float> out(size_t(num_tokens * num_rows));
    linear_bf16(x.data(), k, num_tokens, w.data(), num_rows, k, out.data());
    for (int64_t t = 0; t < num_tokens; ++t) {
        for (int64_t n = 0; n < num_rows; ++n) {
            double want = 0;
            for (int64_t i = 0; i < k; ++i)
                want += double(x[size_t(t * k + i)]) * plain[size_t(n * k + i)];
            CHECK(std::abs(out[size_t(t * num_rows + n)] - want) < 1e-4);
        }
    }
}

}  // namespace

TEST(kernels_norms_and_activations) {
    on_each_isa([] {
        for (int64_t n : {1, 3, 16, 33, 640}) {
            check_norm(n);
            check_activation(n);
        }
    });
}

TEST(kernels_linear_bf16) {
    on_each_isa([] {
        for (int64_t num_tokens : {1, 2, 3, 4, 9}) {
            check_linear(num_tokens, 50, 31);
            check_linear(num_tokens, 7, 64);
            check_linear(num_tokens, 1, 1);
        }
    });
}

TEST(kernels_blocks_are_copied_in_every_layer) {
    KvView kv = {};
    kv.num_blocks = 3;
    kv.tile_bytes = 64;
    std::vector<uint8_t> arena(2 * 3 * 64);
    for (size_t i = 0; i < arena.size(); ++i) arena[i] = static_cast<uint8_t>(i);
    kv.base = arena.data();
    KvView second = kv;
    second.base += 3 * 64;
    const int64_t pairs[] = {0, 2};
    copy_blocks({kv, second}, pairs, 1);
    for (size_t layer : {size_t{0}, size_t{192}}) {
        CHECK(!std::memcmp(&arena[layer], &arena[layer + 128], 64));
        CHECK(arena[layer + 64] == static_cast<uint8_t>(layer + 64));
    }
}

TEST(kernels_gguf_reads_no_byte_too_many) {
    for (const char *name :
         {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"}) {
        const GgufType *type = find_gguf_type(name);
        CHECK(type != nullptr);
        const int64_t count = 700;
        std::unique_ptr<uint8_t[]> data(new uint8_t[size_t(count * type->block_bytes)]());
        std::unique_ptr<float[]> out(new float[size_t(count * type->block_values)]);
        gguf_decode(*type, data.get(), count, out.get());
        CHECK(out[size_t(count * type->block_values - 1)] == 0.0f);
    }
    CHECK(find_gguf_type("Q9_9") == nullptr);
}

TEST(kernels_pool_runs_each_item_once) {
    for (int count : {1, 2, 5, 3}) {
        set_num_threads(count);
        for (int64_t num_items : {0, 1, 2, 1000}) {
            std::vector<std::atomic<int>> seen(static_cast<size_t>(num_items));
            parallel_for(num_items, [&](int64_t i) { ++seen[size_t(i)]; });
            for (auto &times : seen) CHECK(times == 1);
        }
    }
    set_num_threads(2);
}

TEST(kernels_pool_serves_several_callers) {
    std::atomic<int64_t> total{0};
    auto call = [&] {
        for (int round = 0; round < 200; ++round) parallel_for(20, [&](int64_t i) { total += i; });
    };
    std::thread a(call), b(call);
    a.join();
    b.join();
    CHECK(total == 2 * 200 * 190);
}
