// Conversions between float32 and bfloat16. Included by isa.cc.

#pragma once

namespace hexserve {
namespace HEXSERVE_ISA {

template <typename From, typename To>
static void convert(const From* x, To* y, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(y + i, load(x + i));
  if (i < count) store_first(y + i, load_first(x + i, count - i), count - i);
}

constexpr ConvertTable kConvert = {convert<float, uint16_t>, convert<uint16_t, float>};

}  // namespace HEXSERVE_ISA
}  // namespace hexserve
