#pragma once

#include <cstdint>

namespace hexserve {

// Between float32 and bfloat16, rounding to nearest even.
struct ConvertTable {
  void (*narrow)(const float* x, uint16_t* y, int64_t count);
  void (*widen)(const uint16_t* x, float* y, int64_t count);
};

}  // namespace hexserve
