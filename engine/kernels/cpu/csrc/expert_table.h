#pragma once

#include <cstdint>

#include "linear_table.h"

namespace hexserve {

// y[i] = x[i] * weight, rounded to T.
template <typename T>
using WeighRow = void (*)(const T* x, float weight, T* y, int64_t width);

// y[token[i]] += weight[i] * sums[i]; no weight (null) is ones, rows of y are `stride` apart.
using AddSums = void (*)(const PanelSums& sums, int64_t rows, int64_t features, const int32_t* token,
                         const float* weight, float* y, int64_t stride);

struct ExpertTable {
  WeighRow<float> weigh_f32;
  WeighRow<uint16_t> weigh_bf16;
  AddSums add;
};

}  // namespace hexserve
