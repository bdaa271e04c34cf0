#pragma once

#include <cstdint>

namespace hexserve {

// Rotary embedding of the `heads` heads of one token: pairs (i, i + width / 2) by the angles whose
// width / 2 cosines and sines are given. The rest of a head stays as it is. x and y may be the same.
template <typename T>
using Rotate = void (*)(const T* x, const float* angles, int64_t width, T* y, int64_t heads,
                        int64_t head_dim);

struct RotateTable {
  Rotate<float> f32;
  Rotate<uint16_t> bf16;
};

}  // namespace hexserve
