#pragma once

#include <cstdint>

namespace hexserve {

// y[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i], in float32.
template <typename T>
using RmsNorm = void (*)(const T* x, const T* weight, T* y, int64_t width, float eps);

struct NormTable {
  RmsNorm<float> f32;
  RmsNorm<uint16_t> bf16;
};

}  // namespace hexserve
