#include "cache/sha256.hpp"

#include <bit>
#include <cstring>
#include <vector>

#include "cache/sha256_constants.hpp"

namespace pagemill::cache::sha256 {

const uint32_t kInitial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                              0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

static uint32_t load_big_endian(const uint8_t *p) {
    return uint32_t(p[0]) << 24 | uint32_t(p[1]) << 16 | uint32_t(p[2]) << 8 | p[3];
}

static void store_big_endian(uint8_t *p, uint32_t word) {
    for (int i = 0; i < 4; ++i) p[i] = uint8_t(word >> (24 - 8 * i));
}

static void expand(uint32_t w[64], const uint8_t *block) {
    for (int i = 0; i < 16; ++i) w[i] = load_big_endian(block + 4 * i);
    for (int i = 16; i < 64; ++i) {
        uint32_t a = w[i - 15], b = w[i - 2];
        uint32_t s0 = std::rotr(a, 7) ^ std::rotr(a, 18) ^ (a >> 3);
        uint32_t s1 = std::rotr(b, 17) ^ std::rotr(b, 19) ^ (b >> 10);
        w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
}

void compress_portable(uint32_t state[8], const uint8_t *data, size_t num_blocks) {
    uint32_t w[64], v[8];
    for (; num_blocks > 0; --num_blocks, data += 64) {
        expand(w, data);
        std::memcpy(v, state, sizeof v);
        for (int i = 0; i < 64; ++i) {
            uint32_t e = v[4], a = v[0];
            uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
            uint32_t choice = (e & v[5]) ^ (~e & v[6]);
            uint32_t t1 = v[7] + s1 + choice + kRound[i] + w[i];
            uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
            uint32_t majority = (a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]);
            for (int k = 7; k > 0; --k) v[k] = v[k - 1];
            v[4] += t1;
            v[0] = t1 + s0 + majority;
        }
        for (int k = 0; k < 8; ++k) state[k] += v[k];
    }
}

Compress best() {
    static const Compress chosen = has_instructions() ? compress_instructions : compress_portable;
    return chosen;
}

void store_digest(const uint32_t state[8], Hash &out) {
    for (int i = 0; i < 8; ++i) store_big_endian(out.data() + 4 * i, state[i]);
}

Hash digest(const uint8_t *data, size_t num_bytes, Compress compress) {
    uint32_t state[8];
    std::memcpy(state, kInitial, sizeof state);
    size_t whole = num_bytes / 64, rest = num_bytes % 64;
    if (whole) compress(state, data, whole);
    // What is left, a one bit, zeros, the length in bits: one block or two.
    uint8_t tail[128] = {};
    if (rest) std::memcpy(tail, data + 64 * whole, rest);
    tail[rest] = 0x80;
    size_t tail_blocks = rest < 56 ? 1 : 2;
    uint64_t num_bits = uint64_t(num_bytes) * 8;
    store_big_endian(tail + 64 * tail_blocks - 8, uint32_t(num_bits >> 32));
    store_big_endian(tail + 64 * tail_blocks - 4, uint32_t(num_bits));
    compress(state, tail, tail_blocks);
    Hash out;
    store_digest(state, out);
    return out;
}

Hash hmac(const uint8_t *key, size_t key_bytes, const uint8_t *data, size_t num_bytes) {
    uint8_t padded[64] = {};
    if (key_bytes > 64) {
        Hash short_key = digest(key, key_bytes);
        std::memcpy(padded, short_key.data(), short_key.size());
    } else if (key_bytes) {
        std::memcpy(padded, key, key_bytes);
    }
    std::vector<uint8_t> inner(64 + num_bytes), outer(64 + sizeof(Hash));
    for (int i = 0; i < 64; ++i) {
        inner[i] = padded[i] ^ 0x36;
        outer[i] = padded[i] ^ 0x5c;
    }
    if (num_bytes) std::memcpy(inner.data() + 64, data, num_bytes);
    Hash inner_digest = digest(inner.data(), inner.size());
    std::memcpy(outer.data() + 64, inner_digest.data(), inner_digest.size());
    return digest(outer.data(), outer.size());
}

}  // namespace pagemill::cache::sha256
