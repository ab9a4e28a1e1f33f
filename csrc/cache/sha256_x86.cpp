// SHA-256 with the SHA instructions of x86-64; elsewhere the portable code is all there is.
#include "cache/sha256.hpp"

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>

#include "cache/sha256_constants.hpp"

namespace pagemill::cache::sha256 {

bool has_instructions() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return false;
    bool vectors = (c & bit_SSSE3) && (c & bit_SSE4_1);
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    return vectors && (b & (1u << 29));
}

// The instructions keep the eight words as two registers: a b e f and c d g h. Each quad does four
// rounds; from the fifth quad on its message words come from the four quads before.
__attribute__((target("sha,sse4.1,ssse3"))) void compress_instructions(uint32_t state[8],
                                                                       const uint8_t *data,
                                                                       size_t num_blocks) {
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i *>(state));
    __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i *>(state + 4));
    low = _mm_shuffle_epi32(low, 0xB1);
    high = _mm_shuffle_epi32(high, 0x1B);
    __m128i abef = _mm_alignr_epi8(low, high, 8);
    __m128i cdgh = _mm_blend_epi16(high, low, 0xF0);
    for (; num_blocks > 0; --num_blocks, data += 64) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[4];
#pragma GCC unroll 16
        for (int quad = 0; quad < 16; ++quad) {
            __m128i &words = w[quad & 3];
            if (quad < 4) {
                words = _mm_loadu_si128(reinterpret_cast<const __m128i *>(data + 16 * quad));
                words = _mm_shuffle_epi8(words, big_endian);
            } else {
                const __m128i last = w[(quad + 3) & 3];
                const __m128i mixed = _mm_sha256msg1_epu32(words, w[(quad + 1) & 3]);
                const __m128i middle = _mm_alignr_epi8(last, w[(quad + 2) & 3], 4);
                words = _mm_sha256msg2_epu32(_mm_add_epi32(mixed, middle), last);
            }
            const __m128i *k = reinterpret_cast<const __m128i *>(kRound + 4 * quad);
            const __m128i sum = _mm_add_epi32(words, _mm_load_si128(k));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0E));
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    low = _mm_shuffle_epi32(abef, 0x1B);
    high = _mm_shuffle_epi32(cdgh, 0xB1);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(state), _mm_blend_epi16(low, high, 0xF0));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(state + 4), _mm_alignr_epi8(high, low, 8));
}

}  // namespace pagemill::cache::sha256

#else

namespace pagemill::cache::sha256 {

bool has_instructions() { return false; }

void compress_instructions(uint32_t state[8], const uint8_t *data, size_t num_blocks) {
    compress_portable(state, data, num_blocks);
}

}  // namespace pagemill::cache::sha256

#endif
