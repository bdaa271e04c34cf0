// Sums of products of a few rows and a few panels, and what becomes of them. Included by isa.cc.

#pragma once

#include <string.h>

namespace hexserve {
namespace HEXSERVE_ISA {

constexpr int kVecsOfPanel = kPanel / kLanes;
// Rows of a tile: its sums, one step of a panel and one of x fill the registers (32, or 16).
constexpr int kTileRows = kLanes == 16 ? 12 : 3;
// Most steps of a tile: it stays in L1, and a group's panels of this depth stay in L2.
constexpr int64_t kDepth = kLanes * 20;

// The weights of vector `v` of the step at `w`.
template <typename T>
static inline auto weights_of_step(const T* w, int v) {
  return load_step(w + v * kLanes * kInputsPerStep<T>);
}
template <typename T>
static inline auto weights_of_step(const int8_t* w, int v) {
  return expand_step<T>(w + v * kLanes);
}

template <typename T, typename W>
static inline void prefetch_step(const W* w) {
  constexpr int64_t kBytes = kPanel * kInputsPerStep<T> * int64_t(sizeof(W));
  for (int64_t line = 0; line < kBytes; line += kLine) prefetch((const char*)w + kBytesAhead + line);
}

// `rows` of a panel's sums += x panel. Rows of x are kDepth steps apart. The first tile of rows reads
// the panel from memory, where the others find it in L2; a line for each step is fetched there
// from `next` on.
template <int rows, bool first, typename T, typename W>
static void add_tile(const T* x, const W* panel, const W* next, int64_t steps, float (*sums)[kPanel]) {
  constexpr int64_t kLaneSize = kInputsPerStep<T>;
  Vec sum[rows][kVecsOfPanel];
#pragma GCC unroll 12
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecsOfPanel; ++v) sum[i][v] = load(sums[i] + v * kLanes);
  }
  for (int64_t step = 0; step < steps; ++step) {
    const W* w = panel + step * kPanel * kLaneSize;
    if constexpr (first) prefetch_step<T>(w);
    prefetch_l2((const char*)next + step * kLine);
    decltype(load_step(x)) loaded[kVecsOfPanel];
#pragma GCC unroll 4
    for (int v = 0; v < kVecsOfPanel; ++v) loaded[v] = weights_of_step<T>(w, v);
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
template <int most, bool first, typename T, typename W>
static inline void add_rows(int64_t rows, const T* x, const W* panel, const W* next, int64_t steps,
                            float (*sums)[kPanel]) {
  if constexpr (most > 1) {
    if (rows < most) return add_rows<most - 1, first>(rows, x, panel, next, steps, sums);
  }
  add_tile<most, first>(x, panel, next, steps, sums);
}

// Rows are spread evenly over as few tiles as there can be: a lone last row would cost like six.
static inline int64_t tiles_of(int64_t rows) { return (rows + kTileRows - 1) / kTileRows; }

// Likewise steps over depths.
static inline int64_t depths_of(int64_t steps) { return (steps + kDepth - 1) / kDepth; }

// sums[p] += x weights[p], for `depth` steps; rows of x are `stride` steps apart. `next` is what the
// same threads read after `weights`: the first two tiles of rows fetch half of it each, so that memory
// is read while sums are computed from L2.
template <typename T, typename W>
static void add_depth(const T* x, int64_t stride, int64_t rows, int64_t depth, const W* const* weights,
                      const W* const* next, int64_t count, PanelSums* sums) {
  constexpr int64_t kLaneSize = kInputsPerStep<T>;
  const int64_t tiles = tiles_of(rows);
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t first = rows * t / tiles, end = rows * (t + 1) / tiles;
    // A copy: rows a power of two apart would push one another out of L1.
    alignas(64) T tile[kTileRows * kDepth * kLaneSize];
    for (int64_t i = first; i < end; ++i) {
      memcpy(tile + (i - first) * kDepth * kLaneSize, x + i * stride * kLaneSize, depth * sizeof(float));
    }
    for (int64_t p = 0; p < count; ++p) {
      const bool fetches = tiles > 1 && t < 2;
      const W* half = fetches ? next[p] + t * depth * kPanel * kLaneSize / 2 : weights[p];
      if (t == 0) {
        add_rows<kTileRows, true>(end - first, tile, weights[p], half, depth, sums[p] + first);
      } else {
        add_rows<kTileRows, false>(end - first, tile, weights[p], half, depth, sums[p] + first);
      }
    }
  }
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
static void start_sums(const Panel<T, int8_t>&, int64_t rows, PanelSums& sums) {
  memset(sums, 0, rows * sizeof(sums[0]));
}

// One row's sums += x panel, in one go: there is no other row to share what is in a cache, and memory
// is read in its order.
template <typename T, typename W>
static void add_row(const T* x, const W* panel, int64_t steps, float (&sums)[kPanel]) {
  Vec sum[kVecsOfPanel];
#pragma GCC unroll 4
  for (int v = 0; v < kVecsOfPanel; ++v) sum[v] = load(sums + v * kLanes);
  for (int64_t step = 0; step < steps; ++step) {
    const W* w = panel + step * kPanel * kInputsPerStep<T>;
    prefetch_step<T>(w);
    const auto input = broadcast_step(x + step * kInputsPerStep<T>);
#pragma GCC unroll 4
    for (int v = 0; v < kVecsOfPanel; ++v) sum[v] = multiply_add(input, weights_of_step<T>(w, v), sum[v]);
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVecsOfPanel; ++v) store(sums + v * kLanes, sum[v]);
}

// With the weights as they are stored.
template <typename T, typename W>
static void multiply_panels(const T* x, int64_t rows, int64_t steps, const Panel<T, W>* panels, int64_t count,
                            PanelSums* sums) {
  constexpr int64_t kLaneSize = kInputsPerStep<T>;
  for (int64_t p = 0; p < count; ++p) start_sums(panels[p], rows, sums[p]);
  if (rows == 1) {
    for (int64_t p = 0; p < count; ++p) add_row(x, panels[p].weight, steps, sums[p][0]);
    return;
  }
  const int64_t depths = depths_of(steps);
  for (int64_t d = 0; d < depths; ++d) {
    const int64_t begin = steps * d / depths, end = steps * (d + 1) / depths;
    const W *weights[kMostPanels], *next[kMostPanels];
    for (int64_t p = 0; p < count; ++p) {
      weights[p] = panels[p].weight + begin * kPanel * kLaneSize;
      next[p] = d + 1 < depths ? panels[p].weight + end * kPanel * kLaneSize : panels[p].next;
    }
    add_depth(x + begin * kLaneSize, steps, rows, end - begin, weights, next, count, sums);
  }
}

template <typename T>
static void expand_panel(const int8_t* panel, int64_t steps, T* expanded) {
  constexpr int64_t kLaneSize = kInputsPerStep<T>;
  for (int64_t step = 0; step < steps; ++step) {
    const int8_t* w = panel + step * kPanel * kLaneSize;
    prefetch_step<T>(w);
#pragma GCC unroll 4
    for (int v = 0; v < kVecsOfPanel; ++v) {
      store_step(expanded + (step * kPanel + v * kLanes) * kLaneSize, weights_of_step<T>(w, v));
    }
  }
}

// One tile of rows expands the weights in registers, more share what is expanded in memory.
template <typename T>
static void multiply_quantized(const T* x, int64_t rows, int64_t steps, const Panel<T, int8_t>* panels,
                               int64_t count, PanelSums* sums) {
  if (tiles_of(rows) == 1) return multiply_panels(x, rows, steps, panels, count, sums);
  constexpr int64_t kLaneSize = kInputsPerStep<T>;
  for (int64_t p = 0; p < count; ++p) start_sums(panels[p], rows, sums[p]);
  const int64_t depths = depths_of(steps);
  for (int64_t d = 0; d < depths; ++d) {
    const int64_t begin = steps * d / depths, depth = steps * (d + 1) / depths - begin;
    alignas(64) T expanded[kMostPanels][kDepth * kPanel * kLaneSize];
    const T* weights[kMostPanels];
    for (int64_t p = 0; p < count; ++p) {
      expand_panel(panels[p].weight + begin * kPanel * kLaneSize, depth, expanded[p]);
      weights[p] = expanded[p];
    }
    // Nothing is fetched: what comes next is expanded first.
    add_depth(x + begin * kLaneSize, steps, rows, depth, weights, weights, count, sums);
  }
}

template <typename T>
static void scale_sums(const Panel<T, int8_t>& panel, int64_t rows, PanelSums& sums) {
  for (int v = 0; v < kVecsOfPanel; ++v) {
    const int64_t begin = v * kLanes, there = panel.features - begin;
    const Vec scales = load_first(panel.scales + begin, there);
    const Vec bias = panel.bias == nullptr ? zero() : load_first(panel.bias + begin, there);
    for (int64_t i = 0; i < rows; ++i) store(sums[i] + begin, fma(load(sums[i] + begin), scales, bias));
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

static void cap_sums(int64_t rows, float cap, PanelSums& sums) {
  const Vec most = broadcast(cap);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < kPanel; j += kLanes) {
      store(sums[i] + j, mul(most, tanh(div(load(sums[i] + j), most))));
    }
  }
}

template <typename T, Vec activation(Vec)>
static void store_gated(const PanelSums& gate, const PanelSums& up, int64_t rows, int64_t features, T* y,
                        int64_t stride) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < features; j += kLanes) {
      store_first(y + i * stride + j, mul(activation(load(gate[i] + j)), load(up[i] + j)), features - j);
    }
  }
}

constexpr LinearTable kLinear = {
    multiply_panels<float, float>,
    multiply_panels<uint16_t, uint16_t>,
    multiply_quantized<float>,
    multiply_quantized<uint16_t>,
    scale_sums<float>,
    scale_sums<uint16_t>,
    store_sums<float, float>,
    store_sums<uint16_t, uint16_t>,
    store_sums<uint16_t, float>,
    cap_sums,
    {store_gated<float, silu>, store_gated<float, gelu_tanh>},
    {store_gated<uint16_t, silu>, store_gated<uint16_t, gelu_tanh>},
};

}  // namespace HEXSERVE_ISA
}  // namespace hexserve
