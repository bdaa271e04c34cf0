// Functions of vectors, the same for every instruction set. Included after its vec_*.h.

#pragma once

namespace hexserve {
namespace HEXSERVE_ISA {

// e^x within 2 ulp for x <= 88; exactly 1 at 0; 0 below about -87.3 (-inf included); NaN of NaN.
static inline Vec exp(Vec x) {
  const Vec low = broadcast(-87.336544f);
  // The second operand is what comes out where one is NaN.
  const Vec clamped = min(broadcast(88.376262f), max(low, x));
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
// x / 2 * (1 + tanh(u)) with u = sqrt(2 / pi) * (x + 0.044715 x^3), which is x * sigmoid(2 u).
static inline Vec gelu_tanh(Vec x) {
  const Vec inner = fma(mul(x, x), broadcast(1.5957691216f * 0.044715f), broadcast(1.5957691216f));
  return mul(x, sigmoid(mul(x, inner)));
}
// Within 3 ulp: where 1 - 2 / (e^2x + 1) would lose digits, near 0, by Cephes' polynomial.
static inline Vec tanh(Vec x) {
  const Vec e = exp(min(broadcast(87.0f), add(x, x)));
  const Vec far = sub(broadcast(1.0f), div(broadcast(2.0f), add(e, broadcast(1.0f))));
  const Vec square = mul(x, x);
  Vec p = broadcast(-5.70498872745e-3f);
  p = fma(p, square, broadcast(2.06390887954e-2f));
  p = fma(p, square, broadcast(-5.37397155531e-2f));
  p = fma(p, square, broadcast(1.33314422036e-1f));
  p = fma(p, square, broadcast(-3.33332819422e-1f));
  const Vec near = fma(mul(p, square), x, x);
  return where_less(square, broadcast(0.625f * 0.625f), near, far);
}

}  // namespace HEXSERVE_ISA
}  // namespace hexserve
