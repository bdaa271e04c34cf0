#pragma once

#include <cstdint>

namespace hexserve {

// y[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i], in float32; no weight (null) is ones.
template <typename T, typename W = T>
using RmsNorm = void (*)(const T* x, const W* weight, T* y, int64_t width, float eps);

struct NormTable {
  RmsNorm<float> f32;
  RmsNorm<uint16_t> bf16;
  RmsNorm<uint16_t, float> bf16_by_f32;
};

}  // namespace hexserve
