// The matrix registers of processors with AMX: their shape, for the life of an object.
#pragma once

#include "kernels/vec.hpp"

#ifdef __AMX_TILE__

namespace pagemill::PAGEMILL_ISA {

constexpr int64_t kTileSide = 16, kTileBytes = 64;

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t num_rows[16] = {};

    // All eight registers: 16 rows of 64 bytes.
    TileConfig() {
        for (int i = 0; i < 8; ++i) {
            row_bytes[i] = kTileBytes;
            num_rows[i] = kTileSide;
        }
    }
};

class TileRegisters {
  public:
    explicit TileRegisters(bool is_used = true, const TileConfig &config = {})
        : is_used_(is_used) {
        if (!is_used) return;
        // the intrinsic of GCC 12 reads 8 of the 64 bytes, as far as the compiler knows: without
        // this it may leave the rest unwritten
        asm volatile("" : : "r"(&config) : "memory");
        _tile_loadconfig(&config);
    }
    ~TileRegisters() {
        if (is_used_) _tile_release();
    }
    TileRegisters(const TileRegisters &) = delete;

  private:
    bool is_used_;
};

}  // namespace pagemill::PAGEMILL_ISA

#endif
