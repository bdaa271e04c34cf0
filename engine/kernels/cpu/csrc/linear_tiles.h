// Sums of products of a few rows and a few panels, and what becomes of them. Included by isa.cc.

#pragma once

#include <string.h>

namespace hexserve {
namespace HEXSERVE_ISA {

constexpr int kVecsOfPanel = kPanel / kLanes;
// Rows of a tile: its sums, one step of a panel and one of x fill the registers (32, or 16).
constexpr int kTileRows = kLanes == 16 ? 12 : 3;
// Steps of a tile: it stays in L1, and a group's panels of this depth stay in L2.
constexpr int64_t kDepth = kLanes * 16;

// `rows` of a panel's sums += x panel. Rows of x are kDepth steps apart.
template <int rows, typename T>
static void add_tile(const T* x, const T* panel, int64_t steps, float (*sums)[kPanel]) {
  constexpr int64_t kLaneSize = kInputsPerStep<T>;
  Vec sum[rows][kVecsOfPanel];
#pragma GCC unroll 12
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecsOfPanel; ++v) sum[i][v] = load(sums[i] + v * kLanes);
  }
  for (int64_t step = 0; step < steps; ++step) {
    const T* w = panel + step * kPanel * kLaneSize;
    prefetch(w + kStepsAhead * kPanel * kLaneSize);
    prefetch(w + (kStepsAhead * kPanel + kPanel / 2) * kLaneSize);
    decltype(load_step(w)) loaded[kVecsOfPanel];
#pragma GCC unroll 4
    for (int v = 0; v < kVecsOfPanel; ++v) loaded[v] = load_step(w + v * kLanes * kLaneSize);
#pragma GCC unroll 12
    for (int i = 0; i < rows; ++i) {
      const auto input = broadcast_step(x + (i * kDepth + step) * kLaneSize);
#pragma GCC unroll 4
      for (int v = 0; v < kVecsOfPanel; ++v) sum[i][v] = multiply_add(input, loaded[v], sum[i][v]);
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecsOfPanel; ++v) store(sums[i] + v * kLanes, sum[i][v]);
  }
}

// The loop for this many rows, up to `most`.
template <int most, typename T>
static inline void add_rows(int64_t rows, const T* x, const T* panel, int64_t steps, float (*sums)[kPanel]) {
  if constexpr (most > 1) {
    if (rows < most) return add_rows<most - 1>(rows, x, panel, steps, sums);
  }
  add_tile<most>(x, panel, steps, sums);
}

template <typename T>
static void start_sums(const Panel<T>& panel, int64_t rows, PanelSums& sums) {
  for (int v = 0; v < kVecsOfPanel; ++v) {
    const int64_t begin = v * kLanes;
    const Vec start = panel.bias == nullptr ? zero() : load_first(panel.bias + begin, panel.features - begin);
    for (int64_t i = 0; i < rows; ++i) store(sums[i] + begin, start);
  }
}

template <typename T>
static void multiply_panels(const T* x, int64_t rows, int64_t steps, const Panel<T>* panels, int64_t count,
                            PanelSums* sums) {
  constexpr int64_t kLaneSize = kInputsPerStep<T>;
  for (int64_t p = 0; p < count; ++p) start_sums(panels[p], rows, sums[p]);
  // Rows are spread evenly over as few tiles as there can be: a lone last row would cost like six.
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  for (int64_t begin = 0; begin < steps; begin += kDepth) {
    const int64_t depth = steps - begin < kDepth ? steps - begin : kDepth;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t first = rows * t / tiles, end = rows * (t + 1) / tiles;
      // A copy: rows a power of two apart would push one another out of L1.
      alignas(64) T tile[kTileRows * kDepth * kLaneSize];
      for (int64_t i = first; i < end; ++i) {
        memcpy(tile + (i - first) * kDepth * kLaneSize, x + (i * steps + begin) * kLaneSize,
               depth * sizeof(float));
      }
      for (int64_t p = 0; p < count; ++p) {
        add_rows<kTileRows, T>(end - first, tile, panels[p].weight + begin * kPanel * kLaneSize, depth,
                               sums[p] + first);
      }
    }
  }
}

template <typename T, typename Out>
static void store_sums(const PanelSums& sums, int64_t rows, int64_t features, const T* residual, Out* y,
                       int64_t stride) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < features; j += kLanes) {
      Vec sum = load(sums[i] + j);
      if (residual != nullptr) sum = add(sum, load_first(residual + i * stride + j, features - j));
      store_first(y + i * stride + j, sum, features - j);
    }
  }
}

template <typename T>
static void store_gated(const PanelSums& gate, const PanelSums& up, int64_t rows, int64_t features, T* y,
                        int64_t stride) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < features; j += kLanes) {
      store_first(y + i * stride + j, mul(silu(load(gate[i] + j)), load(up[i] + j)), features - j);
    }
  }
}

constexpr LinearTable kLinear = {
    multiply_panels<float>,         multiply_panels<uint16_t>,   store_sums<float, float>,
    store_sums<uint16_t, uint16_t>, store_sums<uint16_t, float>, store_gated<float>,
    store_gated<uint16_t>,
};

}  // namespace HEXSERVE_ISA
}  // namespace hexserve
