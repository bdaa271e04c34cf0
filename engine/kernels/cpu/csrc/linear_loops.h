// The inner loops of a matmul's call, chosen by its operands; and when threads are worth their waking.

#pragma once

#include <algorithm>
#include <string_view>
#include <type_traits>

#include "kernel_table.h"
#include "operands.h"
#include "parallel.h"

namespace hexserve {

// Below this many products of a row, a panel and a step, another thread takes longer to wake
// than the work does. Up to eight rows cost alike: the time to read the weight. What int8 takes
// less to read, fewer rows take.
constexpr int64_t kWorthWaking = 32768;
constexpr int64_t kRowsPerRead = 8;

// How many rows cost as much as reading a weight does, of which a step takes `step_bytes`.
inline int64_t rows_per_read(int64_t step_bytes) {
  return kRowsPerRead * step_bytes / int64_t(sizeof(float));
}

// How many threads multiply `rows` by that many panels, of which a step takes `step_bytes`.
inline int64_t threads_for(const ffi::ThreadPool& pool, int64_t rows, int64_t panels, int64_t steps,
                           int64_t step_bytes) {
  return std::max(rows, rows_per_read(step_bytes)) * panels * steps < kWorthWaking ? 1 : threads_of(pool);
}

// The inner loops of a weight stored as W; only int8 is scaled.
template <typename T, typename W>
struct Sums {
  using Input = T;
  using Stored = W;
  MultiplyPanels<T, W> multiply;
  ScaleSums<T> scale;

  void operator()(const T* x, int64_t rows, int64_t steps, const Panel<T, W>* panels, int64_t count,
                  PanelSums* sums) const {
    multiply(x, rows, steps, panels, count, sums);
    if constexpr (std::is_same_v<W, int8_t>) {
      for (int64_t p = 0; p < count; ++p) scale(panels[p], rows, sums[p]);
    }
  }
};

// Calls `run` with the loops for x and the weights.
template <typename Run>
ffi::Future with_sums(bool has_pairs, bool is_quantized, const Run& run) {
  const LinearTable& table = kernels().linear;
  if (has_pairs) {
    return is_quantized ? run(Sums<uint16_t, int8_t>{table.multiply_bf16_int8, table.scale_bf16})
                        : run(Sums<uint16_t, uint16_t>{table.multiply_bf16, nullptr});
  }
  return is_quantized ? run(Sums<float, int8_t>{table.multiply_f32_int8, table.scale_f32})
                      : run(Sums<float, float>{table.multiply_f32, nullptr});
}

template <typename T, typename W>
constexpr int64_t kStepBytes = kInputsPerStep<T> * int64_t(sizeof(W));

// Of the activation at `index`.
template <typename T>
StoreGated<T> store_gated(int64_t index) {
  const LinearTable& table = kernels().linear;
  if constexpr (std::is_same_v<T, float>) {
    return table.store_gated_f32[index];
  } else {
    return table.store_gated_bf16[index];
  }
}

// The place of a name among the activations; kActivations if it is none.
inline int64_t activation_of(std::string_view name) {
  return std::find(kActivationNames, kActivationNames + kActivations, name) - kActivationNames;
}

}  // namespace hexserve
