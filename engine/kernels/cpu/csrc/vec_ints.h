// Vectors of kLanes 32-bit integers, and sets of lanes. Included after a vec_*.h.

#pragma once

#include <immintrin.h>

#include <cstdint>

namespace hexserve {
namespace HEXSERVE_ISA {

// Bit i stands for lane i.
using Lanes = uint32_t;

#if defined(__AVX512F__)

struct Ints {
  __m512i bits;
};

static inline Ints broadcast_int(uint32_t x) { return {_mm512_set1_epi32(int32_t(x))}; }
static inline Ints lane_numbers() {
  return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
}
static inline Ints load_ints(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
static inline void store_ints(int32_t* p, Ints x) { _mm512_storeu_si512(p, x.bits); }
// The first n lanes; the others are 0, and are not read.
static inline Ints load_first(const int32_t* p, int64_t n) { return {_mm512_maskz_loadu_epi32(first(n), p)}; }

static inline Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.bits, b.bits)}; }
static inline Ints operator-(Ints a, Ints b) { return {_mm512_sub_epi32(a.bits, b.bits)}; }
static inline Ints operator^(Ints a, Ints b) { return {_mm512_xor_si512(a.bits, b.bits)}; }
static inline Ints operator&(Ints a, Ints b) { return {_mm512_and_si512(a.bits, b.bits)}; }
template <int count>
static inline Ints shift_right(Ints x) { return {_mm512_srli_epi32(x.bits, count)}; }
template <int count>
static inline Ints rotate_left(Ints x) { return {_mm512_rol_epi32(x.bits, count)}; }

static inline Vec to_floats(Ints x) { return _mm512_cvtepi32_ps(x.bits); }
// The same bits as the other type.
static inline Vec as_floats(Ints x) { return _mm512_castsi512_ps(x.bits); }
static inline Ints as_ints(Vec x) { return {_mm512_castps_si512(x)}; }

static inline Lanes first_lanes(int64_t n) { return first(n); }
static inline Lanes at_least(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
static inline Lanes equal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
// a > b, or one of them is NaN.
static inline Lanes not_at_most(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ); }
static inline Lanes is_nan(Vec x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }

// Stores `lanes` side by side, and returns how many they are; may write kLanes.
static inline int64_t store_lanes(int32_t* p, Ints x, Lanes lanes) {
  // Compressing to memory is slow on some processors.
  store_ints(p, {_mm512_maskz_compress_epi32(__mmask16(lanes), x.bits)});
  return __builtin_popcount(lanes);
}
static inline int64_t store_lanes(float* p, Vec x, Lanes lanes) {
  store(p, _mm512_maskz_compress_ps(__mmask16(lanes), x));
  return __builtin_popcount(lanes);
}

#else

struct Ints {
  __m256i bits;
};

static inline Ints broadcast_int(uint32_t x) { return {_mm256_set1_epi32(int32_t(x))}; }
static inline Ints lane_numbers() { return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)}; }
static inline Ints load_ints(const int32_t* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
static inline void store_ints(int32_t* p, Ints x) { _mm256_storeu_si256((__m256i*)p, x.bits); }
// The first n lanes; the others are 0, and are not read.
static inline Ints load_first(const int32_t* p, int64_t n) { return {_mm256_maskload_epi32(p, first(n))}; }

static inline Ints operator+(Ints a, Ints b) { return {_mm256_add_epi32(a.bits, b.bits)}; }
static inline Ints operator-(Ints a, Ints b) { return {_mm256_sub_epi32(a.bits, b.bits)}; }
static inline Ints operator^(Ints a, Ints b) { return {_mm256_xor_si256(a.bits, b.bits)}; }
static inline Ints operator&(Ints a, Ints b) { return {_mm256_and_si256(a.bits, b.bits)}; }
template <int count>
static inline Ints shift_right(Ints x) { return {_mm256_srli_epi32(x.bits, count)}; }
template <int count>
static inline Ints rotate_left(Ints x) {
  return {_mm256_or_si256(_mm256_slli_epi32(x.bits, count), _mm256_srli_epi32(x.bits, 32 - count))};
}

static inline Vec to_floats(Ints x) { return _mm256_cvtepi32_ps(x.bits); }
// The same bits as the other type.
static inline Vec as_floats(Ints x) { return _mm256_castsi256_ps(x.bits); }
static inline Ints as_ints(Vec x) { return {_mm256_castps_si256(x)}; }

static inline Lanes first_lanes(int64_t n) { return n >= kLanes ? 0xff : (1u << n) - 1; }
static inline Lanes at_least(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)); }
static inline Lanes equal(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }
// a > b, or one of them is NaN.
static inline Lanes not_at_most(Vec a, Vec b) {
  return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NLE_UQ));
}
static inline Lanes is_nan(Vec x) { return _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)); }

// Stores `lanes` side by side, and returns how many they are; may write kLanes.
static inline int64_t store_lanes(int32_t* p, Ints x, Lanes lanes) {
  if (lanes == 0xff) {
    store_ints(p, x);
    return kLanes;
  }
  int32_t all[kLanes];
  store_ints(all, x);
  int64_t count = 0;
  for (; lanes != 0; lanes &= lanes - 1) p[count++] = all[__builtin_ctz(lanes)];
  return count;
}
static inline int64_t store_lanes(float* p, Vec x, Lanes lanes) {
  if (lanes == 0xff) {
    store(p, x);
    return kLanes;
  }
  float all[kLanes];
  store(all, x);
  int64_t count = 0;
  for (; lanes != 0; lanes &= lanes - 1) p[count++] = all[__builtin_ctz(lanes)];
  return count;
}

#endif

}  // namespace HEXSERVE_ISA
}  // namespace hexserve
