// Rotary embedding of one token. Included by isa.cc.

#pragma once

#include <string.h>

namespace hexserve {
namespace HEXSERVE_ISA {

template <typename T>
static void rotate(const T* x, const float* angles, int64_t width, T* y, int64_t heads, int64_t head_dim) {
  const int64_t half = width / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t left = half - i;
    const Vec cosine = load_first(angles + i, left), sine = load_first(angles + half + i, left);
    for (int64_t place = i; place < heads * head_dim; place += head_dim) {
      const Vec first = load_first(x + place, left), second = load_first(x + place + half, left);
      store_first(y + place, sub(mul(first, cosine), mul(second, sine)), left);
      store_first(y + place + half, add(mul(second, cosine), mul(first, sine)), left);
    }
  }
  if (x == y || width == head_dim) return;
  for (int64_t place = width; place < heads * head_dim; place += head_dim) {
    memcpy(y + place, x + place, (head_dim - width) * sizeof(T));
  }
}

constexpr RotateTable kRotate = {rotate<float>, rotate<uint16_t>};

}  // namespace HEXSERVE_ISA
}  // namespace hexserve
