// Functions of vectors, the same for every instruction set. Included after its vec_*.h.

#pragma once

namespace hexserve {
namespace HEXSERVE_ISA {

// e^x within 2 ulp for x <= 88; exactly 1 at 0; 0 below about -87.3 (-inf included).
static inline Vec exp(Vec x) {
  const Vec low = broadcast(-87.336544f);
  const Vec clamped = min(max(x, low), broadcast(88.376262f));
  const Vec n = round_nearest(mul(clamped, broadcast(1.44269504f)));
  Vec r = fma(n, broadcast(-0.693359375f), clamped);
  r = fma(n, broadcast(2.12194440e-4f), r);
  // Cephes' polynomial for |r| <= ln 2 / 2.
  Vec p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  const Vec result = scale_by_power(add(fma(p, mul(r, r), r), broadcast(1.0f)), n);
  return zero_below(result, x, low);
}

static inline Vec sigmoid(Vec x) {
  return div(broadcast(1.0f), add(broadcast(1.0f), exp(sub(zero(), max(x, broadcast(-87.0f))))));
}
static inline Vec silu(Vec x) { return mul(x, sigmoid(x)); }
// 1 - 2 / (e^2x + 1): within 2e-7 absolutely.
static inline Vec tanh(Vec x) {
  const Vec e = exp(min(add(x, x), broadcast(87.0f)));
  return sub(broadcast(1.0f), div(broadcast(2.0f), add(e, broadcast(1.0f))));
}

}  // namespace HEXSERVE_ISA
}  // namespace hexserve
