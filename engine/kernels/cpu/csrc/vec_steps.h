// A step is what one lane of a vector multiplies at once: a float32, or a pair of bfloat16.
// Included after the vec_*.h of an instruction set.

#pragma once

namespace hexserve {
namespace HEXSERVE_ISA {

static inline Vec load_step(const float* p) { return load(p); }
static inline Pairs load_step(const uint16_t* p) { return load_pairs(p); }
static inline void store_step(float* p, Vec x) { store(p, x); }
static inline void store_step(uint16_t* p, Pairs x) { store_pairs(p, x); }
static inline Vec broadcast_step(const float* p) { return broadcast(*p); }
static inline Pairs broadcast_step(const uint16_t* p) { return broadcast_pair(p); }
static inline Vec multiply_add(Vec a, Vec b, Vec sum) { return fma(a, b, sum); }
static inline Vec multiply_add(Pairs a, Pairs b, Vec sum) { return dot_pairs(a, b, sum); }

// Of int8, the inputs of a step lie kPanel apart.
template <typename T>
static inline auto expand_step(const int8_t* p) {
  if constexpr (kInputsPerStep<T> == 1) {
    return load(p);
  } else {
    return pair_up(load(p), load(p + kPanel));
  }
}

}  // namespace HEXSERVE_ISA
}  // namespace hexserve
