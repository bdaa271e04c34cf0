// What experts do beyond other matmuls. Included by isa.cc.

#pragma once

namespace hexserve {
namespace HEXSERVE_ISA {

template <typename T>
static void weigh_row(const T* x, float weight, T* y, int64_t width) {
  const Vec factor = broadcast(weight);
  for (int64_t i = 0; i < width; i += kLanes) {
    store_first(y + i, mul(load_first(x + i, width - i), factor), width - i);
  }
}

static void add_sums(const PanelSums& sums, int64_t rows, int64_t features, const int32_t* token,
                     const float* weight, float* y, int64_t stride) {
  for (int64_t i = 0; i < rows; ++i) {
    float* to = y + token[i] * stride;
    const Vec factor = broadcast(weight == nullptr ? 1.0f : weight[i]);
    for (int64_t j = 0; j < features; j += kLanes) {
      const Vec before = load_first(to + j, features - j);
      store_first(to + j, fma(load(sums[i] + j), factor, before), features - j);
    }
  }
}

constexpr ExpertTable kExperts = {weigh_row<float>, weigh_row<uint16_t>, add_sums};

}  // namespace HEXSERVE_ISA
}  // namespace hexserve
