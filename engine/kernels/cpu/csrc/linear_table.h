// Matmuls by packed weights.
//
// A weight lies in panels of 32 outputs; a panel is [steps][32], and a step is what a lane of a
// vector holds of the inputs: one in float32, a pair in bfloat16, always four bytes. So blocking
// and copying are the same for both, and only the multiply-add of one step differs.
//
// Every sum is one float32 that starts at the bias (or 0) and takes the steps in their order,
// with the same instruction however many rows there are. Blocking only stores it and loads it again.
// AMX takes them 16 at once (amx_tiles.h).

#pragma once

#include <cstdint>

namespace hexserve {

constexpr int64_t kPanel = 32;

template <typename T>
constexpr int64_t kInputsPerStep = sizeof(float) / sizeof(T);

// What one call computes at most: its sums are on the stack.
constexpr int64_t kMostRows = 192;
constexpr int64_t kMostPanels = 8;
// How far ahead a panel is prefetched: what memory delivers while a line travels.
constexpr int64_t kStepsAhead = 64;

template <typename T>
struct Panel {
  const T* weight;
  const T* bias;     // of the panel's first output; null is none
  int64_t features;  // outputs that are there: 32, or fewer in a weight's last panel
};

// Of one panel.
using PanelSums = float[kMostRows][kPanel];

// sums[p][i] = bias of panels[p] + x[i] panels[p], for rows of x that lie steps * 4 bytes apart.
template <typename T>
using MultiplyPanels = void (*)(const T* x, int64_t rows, int64_t steps, const Panel<T>* panels,
                                int64_t count, PanelSums* sums);

// y[i] = sums[i] + residual[i]; rows of y and of residual (null is none) are `stride` apart.
template <typename T, typename Out>
using StoreSums = void (*)(const PanelSums& sums, int64_t rows, int64_t features, const T* residual, Out* y,
                           int64_t stride);

// y[i] = silu(gate[i]) * up[i].
template <typename T>
using StoreGated = void (*)(const PanelSums& gate, const PanelSums& up, int64_t rows, int64_t features, T* y,
                            int64_t stride);

struct LinearTable {
  MultiplyPanels<float> multiply_f32;
  MultiplyPanels<uint16_t> multiply_bf16;
  StoreSums<float, float> store_f32;
  StoreSums<uint16_t, uint16_t> store_bf16;
  StoreSums<uint16_t, float> store_bf16_as_f32;
  StoreGated<float> store_gated_f32;
  StoreGated<uint16_t> store_gated_bf16;
};

}  // namespace hexserve
