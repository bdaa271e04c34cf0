// Matmuls by packed weights.
//
// A weight lies in panels of 32 outputs; a panel is [steps][32], and a step is what a lane of a
// vector holds of the inputs: one in float32, a pair in bfloat16, always four bytes. So blocking
// and copying are the same for both, and only the multiply-add of one step differs.
//
// A quantized panel is int8 [in][32], whatever x is: each input's 32 outputs lie side by side, and
// are expanded to x's type, which holds them exactly.
//
// Every sum is one float32 that starts at the bias (or 0) and takes the steps in their order,
// with the same instruction however many rows there are. Blocking only stores it and loads it again.
// AMX takes them 16 at once (amx_tiles.h). A quantized panel's sums start at 0, and are scaled and
// get the bias at the end.

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
constexpr int64_t kBytesAhead = 8192;

// Of a weight stored as W: as T, or quantized to int8.
template <typename T, typename W = T>
struct Panel {
  const W* weight;
  const W* next;        // the panel that is read after it in its place; only fetched, so it may not be there
  const float* scales;  // of the panel's first output; only where W is int8
  const T* bias;        // likewise; null is none
  int64_t features;     // outputs that are there: 32, or fewer in a weight's last panel
};

// Of one panel.
using PanelSums = float[kMostRows][kPanel];

// sums[p][i] = bias of panels[p] + x[i] panels[p], for rows of x that lie steps * 4 bytes apart.
// Of int8 without scales and bias: ScaleSums is to follow.
template <typename T, typename W = T>
using MultiplyPanels = void (*)(const T* x, int64_t rows, int64_t steps, const Panel<T, W>* panels,
                                int64_t count, PanelSums* sums);

// sums[i] = sums[i] * scales + bias.
template <typename T>
using ScaleSums = void (*)(const Panel<T, int8_t>& panel, int64_t rows, PanelSums& sums);

// y[i] = sums[i] + residual[i]; rows of y and of residual (null is none) are `stride` apart.
template <typename T, typename Out>
using StoreSums = void (*)(const PanelSums& sums, int64_t rows, int64_t features, const T* residual, Out* y,
                           int64_t stride);

// sums[i] = cap * tanh(sums[i] / cap).
using CapSums = void (*)(int64_t rows, float cap, PanelSums& sums);

// Of a gated linear; the name of each is at its place in kActivationNames.
enum Activation { kSilu, kGeluTanh, kActivations };
constexpr const char* kActivationNames[kActivations] = {"silu", "gelu_tanh"};

// y[i] = activation(gate[i]) * up[i].
template <typename T>
using StoreGated = void (*)(const PanelSums& gate, const PanelSums& up, int64_t rows, int64_t features, T* y,
                            int64_t stride);

struct LinearTable {
  MultiplyPanels<float> multiply_f32;
  MultiplyPanels<uint16_t> multiply_bf16;
  MultiplyPanels<float, int8_t> multiply_f32_int8;
  MultiplyPanels<uint16_t, int8_t> multiply_bf16_int8;
  ScaleSums<float> scale_f32;
  ScaleSums<uint16_t> scale_bf16;
  StoreSums<float, float> store_f32;
  StoreSums<uint16_t, uint16_t> store_bf16;
  StoreSums<uint16_t, float> store_bf16_as_f32;
  CapSums cap;
  StoreGated<float> store_gated_f32[kActivations];
  StoreGated<uint16_t> store_gated_bf16[kActivations];
};

}  // namespace hexserve
