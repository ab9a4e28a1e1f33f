// Pieces of GGUF blocks that the decoder and the packer both read.
#pragma once

#include <cstdint>
#include <cstring>

namespace pagemill {

inline float bits_to_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t load_u16(const uint8_t *p) { return p[0] | (uint32_t{p[1]} << 8); }

inline uint32_t load_u32(const uint8_t *p) { return load_u16(p) | (load_u16(p + 2) << 16); }

inline float half_to_float(uint32_t half) {
    uint32_t sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 31, mantissa = half & 1023;
    if (exponent == 31) return bits_to_float(sign | 0x7f800000u | (mantissa << 13));
    if (exponent) return bits_to_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
    float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // subnormal: exact
    return sign ? -magnitude : magnitude;
}

inline float load_half(const uint8_t *p) { return half_to_float(load_u16(p)); }

// The way back for a number that came from fp16.
inline uint16_t exact_half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude >= 0x7f800000u) {
        return static_cast<uint16_t>(sign | 0x7c00u | (magnitude >> 13 & 1023));
    }
    if (magnitude >= 0x38800000u) {
        return static_cast<uint16_t>(sign | ((magnitude - (112u << 23)) >> 13));
    }
    const float steps = bits_to_float(magnitude) * 0x1p24f;  // subnormal in fp16
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(steps));
}

inline int fifth_bit(uint32_t high, int i) { return static_cast<int>((high >> i) & 1) << 4; }

// Twelve bytes hold eight 6-bit scales and eight 6-bit minima: the first four of each in the low
// six bits of bytes 0-3 and 4-7; the rest as a nibble of bytes 8-11 under the top two bits of
// those.
inline void unpack_scales(const uint8_t *packed, uint8_t *scales, uint8_t *minima) {
    for (int i = 0; i < 4; ++i) {
        scales[i] = packed[i] & 63;
        minima[i] = packed[i + 4] & 63;
        scales[i + 4] = static_cast<uint8_t>((packed[i + 8] & 15) | ((packed[i] >> 6) << 4));
        minima[i + 4] = static_cast<uint8_t>((packed[i + 8] >> 4) | ((packed[i + 4] >> 6) << 4));
    }
}

}  // namespace pagemill
