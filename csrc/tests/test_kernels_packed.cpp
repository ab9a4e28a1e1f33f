// Packed weights and their products: odd sizes, memory that ends exactly at the end.
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "check.hpp"
#include "kernels/gguf_decode.hpp"
#include "kernels/ops.hpp"

using namespace pagemill;

namespace {

constexpr const char *kTypes[] = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"};

// Packed strips want no border of their own, but a strip's size is a multiple of 64.
struct Case {
    const PackedForm *form;
    std::vector<float> decoded;
    std::vector<uint8_t> strips;
    PackedWeights weights;
};

// Blocks of random bytes; the halves in them are made small numbers.
std::vector<uint8_t> random_blocks(const GgufType &type, int64_t count) {
    std::mt19937 random(static_cast<unsigned>(count));
    std::vector<uint8_t> bytes(size_t(count * type.block_bytes));
    for (uint8_t &byte : bytes) byte = static_cast<uint8_t>(random());
    const bool is_last = !std::strcmp(type.name, "Q6_K");
    for (int64_t i = 0; i < count; ++i) {
        uint8_t *block = bytes.data() + i * type.block_bytes;
        if (is_last) {
            block[209] = 0x10;
        } else {
            block[1] = 0x28;
            block[3] = 0xa4;
        }
    }
    return bytes;
}

void fill(Case &to, const char *name, int64_t num_rows, int64_t k) {
    const GgufType &type = *find_gguf_type(name);
    const int64_t count = num_rows * k / type.block_values;
    const std::vector<uint8_t> blocks = random_blocks(type, count);
    to.form = find_packed_form(name);
    to.decoded.resize(size_t(num_rows * k));
    gguf_decode(type, blocks.data(), count, to.decoded.data());
    to.strips.resize(size_t(num_strips(num_rows) * to.form->strip_bytes(k)));
    pack_weights(*to.form, blocks.data(), num_rows, k, to.strips.data());
    to.weights = {to.form, to.strips.data(), num_rows, k};
}

void check_rows(const Case &packed) {
    const int64_t k = packed.weights.k, ids[] = {packed.weights.num_rows - 1, 0};
    std::vector<float> rows(size_t(2 * k)), all(packed.decoded.size());
    std::vector<uint16_t> halves(all.size());
    unpack_rows(packed.weights, ids, 2, rows.data());
    unpack_packed(packed.weights, 0, packed.weights.num_rows, all.data());
    unpack_packed(packed.weights, 0, packed.weights.num_rows, halves.data());
    for (size_t i = 0; i < all.size(); ++i) {
        const double want = packed.decoded[i];
        CHECK(std::abs(all[i] - want) <= 1e-6 * (1 + std::abs(want)));
        const uint32_t bits = uint32_t{halves[i]} << 16;
        float wide;
        std::memcpy(&wide, &bits, 4);
        CHECK(std::abs(wide - want) <= 0x1p-8 * std::abs(want) + 1e-6);
    }
    for (int64_t i = 0; i < k; ++i) {
        const double want = packed.decoded[size_t(ids[0] * k + i)];
        CHECK(std::abs(rows[size_t(i)] - want) <= 1e-6 * (1 + std::abs(want)));
    }
}

void check_products(const Case &packed, int64_t num_tokens) {
    const int64_t k = packed.weights.k, n = packed.weights.num_rows;
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    std::vector<float> x(size_t(num_tokens * k)), out(size_t(num_tokens * n)), alone;
    for (float &value : x) value = normal(random);
    alone.resize(size_t(n));
    linear_packed(x.data(), num_tokens, packed.weights, out.data(), n);
    for (int64_t t = 0; t < num_tokens; ++t) {
        for (int64_t row = 0; row < n; ++row) {
            double want = 0, size = 0;
            for (int64_t i = 0; i < k; ++i) {
                const double term = double(x[size_t(t * k + i)]) *
                                    packed.decoded[size_t(row * k + i)];
                want += term;
                size += std::abs(packed.decoded[size_t(row * k + i)]);
            }
            CHECK(std::abs(out[size_t(t * n + row)] - want) <= 4 * 0x1p-11 * size + 1e-5);
        }
    }
    linear_packed(x.data() + (num_tokens - 1) * k, 1, packed.weights, alone.data(), n);
    CHECK(!std::memcmp(alone.data(), out.data() + (num_tokens - 1) * n, size_t(n) * 4));
}

}  // namespace

TEST(kernels_packed_weights) {
    for (const char *name : kTypes) {
        Case packed;
        fill(packed, name, 19, 256);
        for (int i = 0; const char *isa = available_isa(i); ++i) {
            CHECK(set_isa(isa));
            check_rows(packed);
            for (int64_t num_tokens : {1, 7, 16, 21, 70}) check_products(packed, num_tokens);
        }
        set_isa("auto");
    }
    CHECK(find_packed_form("F16") == nullptr);
}
