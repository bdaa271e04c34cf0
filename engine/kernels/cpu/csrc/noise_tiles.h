// Gumbel noise by threefry-2x32: a function of a key and a token id, as engine/sampling.py has it.
// Included by isa.cc.

#pragma once

namespace hexserve {
namespace HEXSERVE_ISA {

// Within 2 ulp for normal x > 0; exactly 0 at 1.
static inline Vec log(Vec x) {
  // x = m * 2^e with m within [sqrt(1/2), sqrt(2)).
  const Ints half = broadcast_int(0x3f3504f3);
  const Ints shifted = as_ints(x) - half;
  const Vec e = to_floats(Ints{shift_right<23>(shifted + broadcast_int(0x40000000))} - broadcast_int(128));
  const Vec m = sub(as_floats((shifted & broadcast_int(0x7fffff)) + half), broadcast(1.0f));
  const Vec square = mul(m, m);
  // Cephes' polynomial.
  Vec p = broadcast(7.0376836292e-2f);
  p = fma(p, m, broadcast(-1.1514610310e-1f));
  p = fma(p, m, broadcast(1.1676998740e-1f));
  p = fma(p, m, broadcast(-1.2420140846e-1f));
  p = fma(p, m, broadcast(1.4249322787e-1f));
  p = fma(p, m, broadcast(-1.6668057665e-1f));
  p = fma(p, m, broadcast(2.0000714765e-1f));
  p = fma(p, m, broadcast(-2.4999993993e-1f));
  p = fma(p, m, broadcast(3.3333331174e-1f));
  Vec tail = fma(e, broadcast(-2.12194440e-4f), mul(mul(p, m), square));
  tail = fma(square, broadcast(-0.5f), tail);
  return fma(e, broadcast(0.693359375f), add(m, tail));
}

static inline float log(float x) {
  float lanes[kLanes];
  store(lanes, log(broadcast(x)));
  return lanes[0];
}

struct Key {
  uint32_t a, b;
};

template <int a, int b, int c, int d>
static inline void mix(Ints& x, Ints& y) {
  x = x + y, y = rotate_left<a>(y) ^ x;
  x = x + y, y = rotate_left<b>(y) ^ x;
  x = x + y, y = rotate_left<c>(y) ^ x;
  x = x + y, y = rotate_left<d>(y) ^ x;
}

// The block (x, y) of 20 rounds, in place.
static inline void threefry(Key key, Ints& x, Ints& y) {
  const uint32_t words[3] = {key.a, key.b, key.a ^ key.b ^ 0x1bd11bda};
  const auto inject = [&](uint32_t turn) {
    x = x + broadcast_int(words[turn % 3]);
    y = y + broadcast_int(words[(turn + 1) % 3] + turn);
  };
  inject(0);
  mix<13, 15, 26, 6>(x, y);
  inject(1);
  mix<17, 29, 16, 24>(x, y);
  inject(2);
  mix<13, 15, 26, 6>(x, y);
  inject(3);
  mix<17, 29, 16, 24>(x, y);
  inject(4);
  mix<13, 15, 26, 6>(x, y);
  inject(5);
}

// jax.random.fold_in.
static inline Key fold_in(Key key, int32_t number) {
  Ints x = broadcast_int(0), y = broadcast_int(uint32_t(number));
  threefry(key, x, y);
  int32_t a[kLanes], b[kLanes];
  store_ints(a, x);
  store_ints(b, y);
  return {uint32_t(a[0]), uint32_t(b[0])};
}

// 23 random bits of each token of `ids`.
static inline Ints random_bits(Key key, Ints ids) {
  Ints x = ids, y = broadcast_int(0);
  threefry(key, x, y);
  return shift_right<9>(x);
}

// Standard Gumbel noise: -log(-log(u)), with u in the middle of its step: never 0 and never 1.
static inline Vec gumbel(Ints bits) {
  const Vec uniform = mul(add(to_floats(bits), broadcast(0.5f)), broadcast(0x1p-23f));
  return sub(zero(), log(sub(zero(), log(uniform))));
}

// More than `gumbel`, by far fewer operations: -log(u) is more than 1 - u, and 1 - u no less than the
// power of two in it.
static inline Vec above_gumbel(Ints bits) {
  constexpr float kLog2 = 0.693147182f, kRounding = 0.001f;
  const Vec rest = add(to_floats(broadcast_int(0x7fffff) - bits), broadcast(0.5f));  // 2^23 (1 - u)
  const Vec exponent = to_floats(shift_right<23>(as_ints(rest)));                    // + 127
  return fma(exponent, broadcast(-kLog2), broadcast((127 + 23) * kLog2 + kRounding));
}

}  // namespace HEXSERVE_ISA
}  // namespace hexserve
