// The key of a block: SHA-256 over the parent's key and the block's token ids (u32, little-endian).
#pragma once

#include <bit>
#include <cstring>
#include <vector>

#include "cache/sha256.hpp"

namespace pagemill::cache {

static_assert(std::endian::native == std::endian::little, "token ids are hashed as they lie");

// One padded message, built once: only the parent and the token ids in it change.
class ChainHash {
    std::vector<uint8_t> message_;
    sha256::Compress compress_;
    uint32_t block_size_;
    uint32_t num_kept_bytes_ = 32;

public:
    explicit ChainHash(uint32_t block_size, sha256::Compress compress = sha256::best())
        : compress_(compress), block_size_(block_size) {
        size_t num_bytes = sizeof(Hash) + 4 * size_t(block_size);
        message_.assign((num_bytes + 9 + 63) / 64 * 64, 0);
        message_[num_bytes] = 0x80;
        uint64_t num_bits = num_bytes * 8;
        for (int i = 0; i < 8; ++i)
            message_[message_.size() - 1 - i] = uint8_t(num_bits >> (8 * i));
    }

    Hash operator()(const Hash &parent, const uint32_t *token_ids) {
        std::memcpy(message_.data(), parent.data(), sizeof parent);
        std::memcpy(message_.data() + sizeof parent, token_ids, 4 * size_t(block_size_));
        uint32_t state[8];
        std::memcpy(state, sha256::kInitial, sizeof state);
        compress_(state, message_.data(), message_.size() / 64);
        Hash out;
        sha256::store_digest(state, out);
        if (num_kept_bytes_ < 32) [[unlikely]]
            std::memset(out.data() + num_kept_bytes_, 0, 32 - num_kept_bytes_);
        return out;
    }

    // For tests: the bytes behind the first n become zero, so that different blocks collide.
    void keep_bytes(uint32_t n) { num_kept_bytes_ = n < 32 ? n : 32; }
};

}  // namespace pagemill::cache
