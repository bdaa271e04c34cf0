// What amx_registers.h does, in plain C++: so the loop is tested where there is no AMX. Included by
// amx.cc in place of it. What the processor answers by #UD or #GP stops the program.

#pragma once

#include <string.h>
#include <xmmintrin.h>

#include "amx_config.h"

namespace hexserve {
namespace HEXSERVE_ISA {

struct Tile {
  uint32_t lanes[kTileRows][kTileRowBytes / 4];  // of a float32, or of a pair of bfloat16
  int rows;
  int row_bytes;

  int columns() const { return row_bytes / 4; }
};

static inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}
static inline float first_of_pair(uint32_t pair) { return float_of(pair << 16); }
static inline float second_of_pair(uint32_t pair) { return float_of(pair & 0xffff0000); }

// The operation that Intel's manual (volume 2, TDPBF16PS) gives: the first elements of all pairs
// are multiplied and added in one chain of FMAs from 0, the second ones in another, and the two
// together are added to the sum. So a tile's products are summed before they reach the sum.
// (Intel's guide to the intrinsics adds each product to the sum; the loop relies on neither.)
// Not inlined, so that none of it moves out from between the switches of the rounding mode.
__attribute__((noinline)) static void multiply_tiles(Tile& sum, const Tile& x, const Tile& weights) {
  for (int m = 0; m < sum.rows; ++m) {
    float first[kTileRowBytes / 4] = {}, second[kTileRowBytes / 4] = {};
    for (int k = 0; k < x.columns(); ++k) {
      const float x0 = first_of_pair(x.lanes[m][k]), x1 = second_of_pair(x.lanes[m][k]);
      for (int n = 0; n < sum.columns(); ++n) {
        first[n] = __builtin_fmaf(x0, first_of_pair(weights.lanes[k][n]), first[n]);
        second[n] = __builtin_fmaf(x1, second_of_pair(weights.lanes[k][n]), second[n]);
      }
    }
    for (int n = 0; n < sum.columns(); ++n) {
      const float result = float_of(sum.lanes[m][n]) + (first[n] + second[n]);
      memcpy(&sum.lanes[m][n], &result, sizeof(result));
    }
  }
}

class Tiles {
 public:
  // TDPBF16PS asks no register: denormals are 0 as inputs and outputs, and it rounds to nearest.
  Tiles() : saved_(_mm_getcsr()) { _mm_setcsr(kNoExceptions | kFlushToZero | kDenormalsAreZero); }
  ~Tiles() { _mm_setcsr(saved_); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  void configure(const TileConfig& config) {
    check(config.palette == 1 && config.start_row == 0);
    for (uint8_t byte : config.reserved) check(byte == 0);
    memset(tiles_, 0, sizeof(tiles_));
    for (int i = 0; i < 16; ++i) {
      const int rows = config.rows[i], row_bytes = config.row_bytes[i];
      check(rows <= kTileRows && row_bytes <= kTileRowBytes && row_bytes % 4 == 0);
      check((rows == 0) == (row_bytes == 0) && (i < kTiles || rows == 0));
      if (i >= kTiles) continue;
      tiles_[i].rows = rows;
      tiles_[i].row_bytes = row_bytes;
    }
  }

  template <int tile>
  void load(const void* rows, int64_t stride) {
    Tile& to = in_use(tile);
    for (int i = 0; i < to.rows; ++i) {
      memcpy(to.lanes[i], static_cast<const char*>(rows) + i * stride, to.row_bytes);
    }
  }
  template <int tile>
  void store(void* rows, int64_t stride) {
    const Tile& from = in_use(tile);
    for (int i = 0; i < from.rows; ++i) {
      memcpy(static_cast<char*>(rows) + i * stride, from.lanes[i], from.row_bytes);
    }
  }

  template <int sum, int x, int weights>
  void dot() {
    Tile& to = in_use(sum);
    const Tile &left = in_use(x), &right = in_use(weights);
    check(sum != x && sum != weights && x != weights);
    check(to.rows == left.rows && to.row_bytes == right.row_bytes && left.columns() == right.rows);
    multiply_tiles(to, left, right);
  }

 private:
  static constexpr unsigned kNoExceptions = 0x1f80, kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;

  static void check(bool allowed) {
    if (!allowed) __builtin_trap();
  }
  Tile& in_use(int tile) {
    check(tiles_[tile].rows > 0);
    return tiles_[tile];
  }

  const unsigned saved_;
  Tile tiles_[kTiles] = {};
};

}  // namespace HEXSERVE_ISA
}  // namespace hexserve
