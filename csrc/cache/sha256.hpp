// SHA-256 (FIPS 180-4) and HMAC (RFC 2104), with the processor's SHA instructions where it has
// them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace pagemill::cache {

using Hash = std::array<uint8_t, 32>;

namespace sha256 {

// Feeds num_blocks blocks of 64 bytes into the state.
using Compress = void (*)(uint32_t state[8], const uint8_t *data, size_t num_blocks);

void compress_portable(uint32_t state[8], const uint8_t *data, size_t num_blocks);
bool has_instructions();
void compress_instructions(uint32_t state[8], const uint8_t *data, size_t num_blocks);

// The fastest of the two that this processor can run.
Compress best();

// The first eight words of the state, and the state as a digest.
extern const uint32_t kInitial[8];
void store_digest(const uint32_t state[8], Hash &out);

Hash digest(const uint8_t *data, size_t num_bytes, Compress compress = best());
Hash hmac(const uint8_t *key, size_t key_bytes, const uint8_t *data, size_t num_bytes);

}  // namespace sha256
}  // namespace pagemill::cache
