// The matmul of bfloat16 by tiles. Included by amx.cc after a class Tiles.
//
// A panel in bfloat16 is already what TDPBF16PS wants of its second operand: 16 steps of 16
// outputs are a tile, whose rows lie a step apart. One of int8 is expanded to that first. x is
// copied to tiles.
//
// A sum starts at the bias, and takes the tiles of 16 steps in their order, the last one filled up
// with zeros. Which row of which tile it is in, and what is beside it, changes nothing of it.

#pragma once

#include <string.h>

#include "amx_config.h"
#include "linear_table.h"

namespace hexserve {
namespace HEXSERVE_ISA {

constexpr int64_t kTileSteps = kTileRows;
constexpr int64_t kTileOutputs = kTileRowBytes / sizeof(float);
constexpr int64_t kPairsOfTileRow = kTileRowBytes / sizeof(uint16_t);
constexpr int64_t kStepElements = kPanel * kInputsPerStep<uint16_t>;
// Two tiles of rows by a panel's two of outputs: each load serves two products.
constexpr int64_t kBlockRows = 2 * kTileRows;
// Steps of a block: its x fits L1, and a group's panels of this depth stay in L2.
constexpr int64_t kDepthTiles = 16;
constexpr int64_t kDepth = kDepthTiles * kTileSteps;

// Tile numbers.
enum : int { kTopLeft, kTopRight, kBottomLeft, kBottomRight, kTop, kBottom, kLeft, kRight };

// x of a block, as tiles of 16 steps; the tile of its lower rows follows that of the upper ones.
using BlockInputs = uint16_t[kDepthTiles][kBlockRows][kPairsOfTileRow];

static void start_sums(const Panel<uint16_t, int8_t>&, int64_t rows, PanelSums& sums) {
  memset(sums, 0, rows * sizeof(sums[0]));
}

static void start_sums(const Panel<uint16_t>& panel, int64_t rows, PanelSums& sums) {
  float start[kPanel] = {};
  for (int64_t j = 0; panel.bias != nullptr && j < panel.features; ++j) {
    const uint32_t bits = uint32_t(panel.bias[j]) << 16;
    memcpy(&start[j], &bits, sizeof(bits));
  }
  for (int64_t i = 0; i < rows; ++i) memcpy(sums[i], start, sizeof(start));
}

// `depth` steps of `rows` rows that lie `stride` elements apart, filled up with zeros to whole tiles.
static void copy_inputs(const uint16_t* x, int64_t stride, int64_t rows, int64_t depth, BlockInputs& inputs) {
  for (int64_t i = 0; i < rows; ++i) {
    const uint16_t* row = x + i * stride;
    int64_t t = 0;
    for (; (t + 1) * kTileSteps <= depth; ++t) {
      memcpy(inputs[t][i], row + t * kPairsOfTileRow, kTileRowBytes);
    }
    const int64_t rest = depth - t * kTileSteps;
    if (rest == 0) continue;
    memset(inputs[t][i], 0, kTileRowBytes);
    memcpy(inputs[t][i], row + t * kPairsOfTileRow, rest * sizeof(float));
  }
}

// For a block of 1 to kBlockRows rows.
static TileConfig shapes_of(int64_t rows) {
  TileConfig config = {};
  config.palette = 1;
  const int64_t top = rows < kTileRows ? rows : kTileRows, bottom = rows - top;
  // By tile number.
  const int64_t tile_rows[kTiles] = {top, top, bottom, bottom, top, bottom, kTileSteps, kTileSteps};
  for (int tile = 0; tile < kTiles; ++tile) {
    config.rows[tile] = uint8_t(tile_rows[tile]);
    config.row_bytes[tile] = tile_rows[tile] > 0 ? kTileRowBytes : 0;
  }
  return config;
}

// A block's sums += x panel. A `tall` block has lower rows.
template <bool tall>
static void add_block(Tiles& tiles, const BlockInputs& inputs, const uint16_t* panel, int64_t steps,
                      float (*sums)[kPanel]) {
  constexpr int64_t kSumStride = kPanel * sizeof(float), kWeightStride = kStepElements * sizeof(uint16_t);
  tiles.load<kTopLeft>(sums[0], kSumStride);
  tiles.load<kTopRight>(sums[0] + kTileOutputs, kSumStride);
  if constexpr (tall) {
    tiles.load<kBottomLeft>(sums[kTileRows], kSumStride);
    tiles.load<kBottomRight>(sums[kTileRows] + kTileOutputs, kSumStride);
  }
  for (int64_t step = 0; step < steps; step += kTileSteps) {
    const uint16_t* weights = panel + step * kStepElements;
    alignas(64) uint16_t filled[kTileSteps * kStepElements];
    if (steps - step < kTileSteps) {
      // What follows a panel is another's, or nobody's.
      const int64_t rest = (steps - step) * kStepElements;
      memcpy(filled, weights, rest * sizeof(uint16_t));
      memset(filled + rest, 0, sizeof(filled) - rest * sizeof(uint16_t));
      weights = filled;
    } else {
      for (int64_t i = 0; i < kTileSteps; ++i) {
        const char* ahead = reinterpret_cast<const char*>(weights + i * kStepElements) + kBytesAhead;
        __builtin_prefetch(ahead);
        __builtin_prefetch(ahead + kTileRowBytes);
      }
    }
    const auto& tile = inputs[step / kTileSteps];
    tiles.load<kLeft>(weights, kWeightStride);
    tiles.load<kRight>(weights + kPairsOfTileRow, kWeightStride);
    tiles.load<kTop>(tile[0], kTileRowBytes);
    tiles.dot<kTopLeft, kTop, kLeft>();
    tiles.dot<kTopRight, kTop, kRight>();
    if constexpr (tall) {
      tiles.load<kBottom>(tile[kTileRows], kTileRowBytes);
      tiles.dot<kBottomLeft, kBottom, kLeft>();
      tiles.dot<kBottomRight, kBottom, kRight>();
    }
  }
  tiles.store<kTopLeft>(sums[0], kSumStride);
  tiles.store<kTopRight>(sums[0] + kTileOutputs, kSumStride);
  if constexpr (tall) {
    tiles.store<kBottomLeft>(sums[kTileRows], kSumStride);
    tiles.store<kBottomRight>(sums[kTileRows] + kTileOutputs, kSumStride);
  }
}

// Memory for a depth of a panel of int8, in pairs of bfloat16; of one that is in pairs, none.
template <typename W>
constexpr int64_t kRoom = sizeof(W) == 1 ? kDepth * kStepElements : 1;

static const uint16_t* pairs_of(const uint16_t* weights, int64_t, uint16_t*) { return weights; }
static const uint16_t* pairs_of(const int8_t* weights, int64_t steps, uint16_t* room) {
  for (int64_t step = 0; step < steps; ++step) {
    const int8_t* w = weights + step * kStepElements;
    __builtin_prefetch(w + kBytesAhead);
    for (int64_t i = 0; i < kStepElements; ++i) {
      const float value = w[i % 2 * kPanel + i / 2];
      uint32_t bits;
      memcpy(&bits, &value, sizeof(bits));
      room[step * kStepElements + i] = uint16_t(bits >> 16);  // exact
    }
  }
  return room;
}

template <typename W>
static void multiply_by_tiles(const uint16_t* x, int64_t rows, int64_t steps,
                              const Panel<uint16_t, W>* panels, int64_t count, PanelSums* sums) {
  for (int64_t p = 0; p < count; ++p) start_sums(panels[p], rows, sums[p]);
  const int64_t stride = steps * kInputsPerStep<uint16_t>;
  Tiles tiles;
  int64_t configured = 0;
  for (int64_t begin = 0; begin < steps; begin += kDepth) {
    const int64_t depth = steps - begin < kDepth ? steps - begin : kDepth;
    alignas(64) uint16_t room[kMostPanels][kRoom<W>];
    const uint16_t* weights[kMostPanels];
    for (int64_t p = 0; p < count; ++p) {
      weights[p] = pairs_of(panels[p].weight + begin * kStepElements, depth, room[p]);
    }
    for (int64_t first = 0; first < rows; first += kBlockRows) {
      const int64_t block = rows - first < kBlockRows ? rows - first : kBlockRows;
      alignas(64) BlockInputs inputs;
      copy_inputs(x + first * stride + begin * kInputsPerStep<uint16_t>, stride, block, depth, inputs);
      if (block != configured) tiles.configure(shapes_of(block));
      configured = block;
      for (int64_t p = 0; p < count; ++p) {
        if (block > kTileRows) {
          add_block<true>(tiles, inputs, weights[p], depth, sums[p] + first);
        } else {
          add_block<false>(tiles, inputs, weights[p], depth, sums[p] + first);
        }
      }
    }
  }
}

}  // namespace HEXSERVE_ISA
}  // namespace hexserve
