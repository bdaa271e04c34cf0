// The shapes of AMX's tile registers (palette 1), as its LDTILECFG reads them.

#pragma once

#include <stdint.h>

namespace hexserve {

constexpr int kTiles = 8;
constexpr int kTileRows = 16;
constexpr int kTileRowBytes = 64;

// A tile of no rows or no bytes is not to be used.
struct alignas(64) TileConfig {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t row_bytes[16];  // the processor wants 0 for those past the last tile
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);

}  // namespace hexserve
