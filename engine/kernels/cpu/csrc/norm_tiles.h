// Root mean square norm of one row. Included by isa.cc.

#pragma once

#include <math.h>

namespace hexserve {
namespace HEXSERVE_ISA {

template <typename T, typename W>
static void rms_norm(const T* x, const W* weight, T* y, int64_t width, float eps) {
  Vec squares = zero();
  for (int64_t i = 0; i < width; i += kLanes) {
    const Vec v = load_first(x + i, width - i);
    squares = fma(v, v, squares);
  }
  const Vec scale = broadcast(1.0f / sqrtf(sum_lanes(squares) / float(width) + eps));
  for (int64_t i = 0; i < width; i += kLanes) {
    const Vec v = mul(load_first(x + i, width - i), scale);
    const Vec weighed = weight == nullptr ? v : mul(v, load_first(weight + i, width - i));
    store_first(y + i, weighed, width - i);
  }
}

constexpr NormTable kNorm = {rms_norm<float, float>, rms_norm<uint16_t, uint16_t>, rms_norm<uint16_t, float>};

}  // namespace HEXSERVE_ISA
}  // namespace hexserve
