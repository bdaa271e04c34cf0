// Vectors of 8 floats (AVX2 and FMA). Included by one instruction set's file alone.

#pragma once

#include <immintrin.h>

#include <cstdint>

namespace hexserve {
namespace HEXSERVE_ISA {

constexpr int kLanes = 8;
using Vec = __m256;

static inline __m256i first(int64_t n) {
  const int count = n >= kLanes ? kLanes : n <= 0 ? 0 : int(n);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

static inline Vec zero() { return _mm256_setzero_ps(); }
static inline Vec broadcast(float x) { return _mm256_set1_ps(x); }
static inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
static inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
// The first n lanes; the others are 0, and are not read or written.
static inline Vec load_first(const float* p, int64_t n) { return _mm256_maskload_ps(p, first(n)); }
static inline void store_first(float* p, Vec x, int64_t n) { _mm256_maskstore_ps(p, first(n), x); }

static inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
static inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
static inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
static inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
static inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
static inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
static inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
// `x` in the first n lanes, `other` in the rest.
static inline Vec keep_first(Vec x, Vec other, int64_t n) {
  return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(first(n)));
}
// `yes` where a < b, else `no`.
static inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
  return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
// `x` unless `tested` < low, then 0.
static inline Vec zero_below(Vec x, Vec tested, Vec low) {
  return _mm256_and_ps(x, _mm256_cmp_ps(tested, low, _CMP_NLT_UQ));
}
static inline Vec round_nearest(Vec x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// x * 2^n for whole n within [-126, 127].
static inline Vec scale_by_power(Vec x, Vec n) {
  const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(bits));
}
// Fixed trees: the same bits wherever they are used.
static inline float sum_lanes(Vec x) {
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
static inline float max_lanes(Vec x) {
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

// bfloat16 is stored as its 16 bits.
static inline Vec widen(__m128i bits) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
static inline Vec load(const uint16_t* p) { return widen(_mm_loadu_si128((const __m128i*)p)); }
static inline Vec load(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
// The first n of kLanes; the others are 0, and are not read.
static inline __m128i first_bits(const uint16_t* p, int64_t n) {
  if (n >= kLanes) return _mm_loadu_si128((const __m128i*)p);
  uint16_t whole[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) whole[i] = p[i];
  return _mm_loadu_si128((const __m128i*)whole);
}
static inline Vec load_first(const uint16_t* p, int64_t n) { return widen(first_bits(p, n)); }
// Rounds to nearest even; NaN stays NaN.
static inline __m128i narrow(Vec x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i kept = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(kept), _mm256_extracti128_si256(kept, 1));
}
static inline void store(uint16_t* p, Vec x) { _mm_storeu_si128((__m128i*)p, narrow(x)); }
static inline void store_first(uint16_t* p, Vec x, int64_t n) {
  uint16_t whole[kLanes];
  store(whole, x);
  for (int64_t i = 0; i < kLanes && i < n; ++i) p[i] = whole[i];
}

// x, loaded once: compilers would rather load it again for each use.
template <typename V>
static inline V in_register(V x) {
  asm("" : "+x"(x));
  return x;
}

// Rows become columns: lane j of rows[i] moves to lane i of rows[j].
static inline void transpose(Vec (&rows)[kLanes]) {
  Vec pairs[kLanes], quads[kLanes];
  for (int i = 0; i < kLanes; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  // Half h of quads[4k + j] is column 4h + j of rows 4k ... 4k + 3.
  for (int i = 0; i < kLanes; ++i) {
    const __m256d a = _mm256_castps_pd(pairs[i / 4 * 4 + i / 2 % 2]);
    const __m256d b = _mm256_castps_pd(pairs[i / 4 * 4 + i / 2 % 2 + 2]);
    quads[i] = _mm256_castpd_ps(i % 2 == 0 ? _mm256_unpacklo_pd(a, b) : _mm256_unpackhi_pd(a, b));
  }
  for (int j = 0; j < 4; ++j) {
    rows[j] = _mm256_permute2f128_ps(quads[j], quads[4 + j], 0x20);
    rows[4 + j] = _mm256_permute2f128_ps(quads[j], quads[4 + j], 0x31);
  }
}

// The first and the second bfloat16 of the pair in each lane.
static inline Vec first_of_pairs(Vec pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs), 16));
}
static inline Vec second_of_pairs(Vec pairs) {
  return _mm256_and_ps(pairs, _mm256_castsi256_ps(_mm256_set1_epi32(int32_t(0xffff0000))));
}

// Products of bfloat16 pairs: lane i of `a` and `b` holds elements 2i and 2i + 1.
using Pairs = __m256i;
static inline Pairs load_pairs(const uint16_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
static inline void store_pairs(uint16_t* p, Pairs x) { _mm256_storeu_si256((__m256i*)p, x); }
// Lane i holds a[i] and b[i]; the first n lanes, the others are 0.
static inline Pairs pair_up(const uint16_t* a, const uint16_t* b, int64_t n) {
  const __m256i low = _mm256_cvtepu16_epi32(first_bits(a, n));
  const __m256i high = _mm256_cvtepu16_epi32(first_bits(b, n));
  return _mm256_or_si256(low, _mm256_slli_epi32(high, 16));
}
// Of values that bfloat16 holds exactly: the upper half of each lane.
static inline Pairs pair_up(Vec first, Vec second) {
  const __m256i shifted = _mm256_srli_epi32(_mm256_castps_si256(first), 16);
  return _mm256_blend_epi16(shifted, _mm256_castps_si256(second), 0xaa);
}
static inline Pairs broadcast_pair(const uint16_t* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, 4);
  return _mm256_set1_epi32(pair);
}
static inline Vec dot_pairs(Pairs a, Pairs b, Vec c) {
  const __m256i high = _mm256_set1_epi32(int32_t(0xffff0000));
  const Vec low = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)),
                                  _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)), c);
  return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(a, high)),
                         _mm256_castsi256_ps(_mm256_and_si256(b, high)), low);
}

}  // namespace HEXSERVE_ISA
}  // namespace hexserve
