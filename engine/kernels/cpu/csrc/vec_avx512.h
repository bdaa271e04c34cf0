// Vectors of 16 floats (AVX-512 F, BW, DQ, VL). Included by one instruction set's file alone.

#pragma once

#include <immintrin.h>

#include <cstdint>

namespace hexserve {
namespace HEXSERVE_ISA {

constexpr int kLanes = 16;
using Vec = __m512;

static inline __mmask16 first(int64_t n) {
  return n >= kLanes ? __mmask16(0xffff) : n <= 0 ? __mmask16(0) : __mmask16((1u << n) - 1);
}

static inline Vec zero() { return _mm512_setzero_ps(); }
static inline Vec broadcast(float x) { return _mm512_set1_ps(x); }
static inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
// The first n lanes; the others are 0, and are not read or written.
static inline Vec load_first(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first(n), p); }
static inline void store_first(float* p, Vec x, int64_t n) { _mm512_mask_storeu_ps(p, first(n), x); }

static inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
static inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
static inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
static inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
static inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
static inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
static inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
// `x` in the first n lanes, `other` in the rest.
static inline Vec keep_first(Vec x, Vec other, int64_t n) { return _mm512_mask_blend_ps(first(n), other, x); }
// `yes` where a < b, else `no`.
static inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
// `x` unless `tested` < low, then 0.
static inline Vec zero_below(Vec x, Vec tested, Vec low) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(tested, low, _CMP_NLT_UQ), x);
}
static inline Vec round_nearest(Vec x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// x * 2^n for whole n within [-126, 127].
static inline Vec scale_by_power(Vec x, Vec n) {
  const __m512i bits = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
  return _mm512_mul_ps(x, _mm512_castsi512_ps(bits));
}
// Fixed trees: the same bits wherever they are used.
static inline float sum_lanes(Vec x) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
static inline float max_lanes(Vec x) {
  const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

// bfloat16 is stored as its 16 bits.
static inline Vec widen(__m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
static inline Vec load(const uint16_t* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
static inline Vec load(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
static inline Vec load_first(const uint16_t* p, int64_t n) {
  return widen(_mm256_maskz_loadu_epi16(first(n), p));
}
// Rounds to nearest even; NaN stays NaN.
static inline __m256i narrow(Vec x) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
#endif
}
static inline void store(uint16_t* p, Vec x) { _mm256_storeu_si256((__m256i*)p, narrow(x)); }
static inline void store_first(uint16_t* p, Vec x, int64_t n) {
  _mm256_mask_storeu_epi16(p, first(n), narrow(x));
}

// x, loaded once: compilers would rather load it again for each use.
template <typename V>
static inline V in_register(V x) {
  asm("" : "+v"(x));
  return x;
}

// Rows become columns: lane j of rows[i] moves to lane i of rows[j].
static inline void transpose(Vec (&rows)[kLanes]) {
  Vec pairs[kLanes], quads[kLanes];
  for (int i = 0; i < kLanes; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
  // Quarter q of quads[4k + j] is column 4q + j of rows 4k ... 4k + 3.
  for (int i = 0; i < kLanes; ++i) {
    const __m512d a = _mm512_castps_pd(pairs[i / 4 * 4 + i / 2 % 2]);
    const __m512d b = _mm512_castps_pd(pairs[i / 4 * 4 + i / 2 % 2 + 2]);
    quads[i] = _mm512_castpd_ps(i % 2 == 0 ? _mm512_unpacklo_pd(a, b) : _mm512_unpackhi_pd(a, b));
  }
  constexpr int kEven = 0x88, kOdd = 0xdd;  // quarters 0 and 2, 1 and 3, of each operand
  for (int j = 0; j < 4; ++j) {
    const Vec top_even = _mm512_shuffle_f32x4(quads[j], quads[4 + j], kEven);
    const Vec top_odd = _mm512_shuffle_f32x4(quads[j], quads[4 + j], kOdd);
    const Vec bottom_even = _mm512_shuffle_f32x4(quads[8 + j], quads[12 + j], kEven);
    const Vec bottom_odd = _mm512_shuffle_f32x4(quads[8 + j], quads[12 + j], kOdd);
    rows[j] = _mm512_shuffle_f32x4(top_even, bottom_even, kEven);
    rows[4 + j] = _mm512_shuffle_f32x4(top_odd, bottom_odd, kEven);
    rows[8 + j] = _mm512_shuffle_f32x4(top_even, bottom_even, kOdd);
    rows[12 + j] = _mm512_shuffle_f32x4(top_odd, bottom_odd, kOdd);
  }
}

// The first and the second bfloat16 of the pair in each lane.
static inline Vec first_of_pairs(Vec pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs), 16));
}
static inline Vec second_of_pairs(Vec pairs) {
  return _mm512_and_ps(pairs, _mm512_castsi512_ps(_mm512_set1_epi32(int32_t(0xffff0000))));
}

// Products of bfloat16 pairs: lane i of `a` and `b` holds elements 2i and 2i + 1.
using Pairs = __m512i;
static inline Pairs load_pairs(const uint16_t* p) { return _mm512_loadu_si512(p); }
static inline void store_pairs(uint16_t* p, Pairs x) { _mm512_storeu_si512(p, x); }
// Lane i holds a[i] and b[i]; the first n lanes, the others are 0.
static inline Pairs pair_up(const uint16_t* a, const uint16_t* b, int64_t n) {
  const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7,
                                         38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m256i low = _mm256_maskz_loadu_epi16(first(n), a), high = _mm256_maskz_loadu_epi16(first(n), b);
  return _mm512_permutex2var_epi16(_mm512_castsi256_si512(low), order, _mm512_castsi256_si512(high));
}
// Of values that bfloat16 holds exactly: the upper half of each lane.
static inline Pairs pair_up(Vec first, Vec second) {
  const __m512i upper = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
  return _mm512_mask_shuffle_epi8(_mm512_castps_si512(second), 0x3333333333333333, _mm512_castps_si512(first),
                                  upper);
}
static inline Pairs broadcast_pair(const uint16_t* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, 4);
  return _mm512_set1_epi32(pair);
}
static inline Vec dot_pairs(Pairs a, Pairs b, Vec c) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
#else
  const __m512i high = _mm512_set1_epi32(int32_t(0xffff0000));
  const Vec low = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)),
                                  _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), c);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, high)),
                         _mm512_castsi512_ps(_mm512_and_si512(b, high)), low);
#endif
}

}  // namespace HEXSERVE_ISA
}  // namespace hexserve
