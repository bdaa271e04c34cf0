// How far down the likeliest tokens go until they weigh enough: for top-k, each weighs 1; for
// top-p, its probability.

#pragma once

#include <cstdint>
#include <cstring>

namespace hexserve {

// Weights are whole numbers: their sums are exact, so that no order of them differs. e^0 is kWhole,
// and as many as kMostTokens of it can be added.
using Mass = int64_t;
constexpr float kWhole = 1099511627776.0f;  // 2^40
constexpr int64_t kMostTokens = int64_t(1) << 22;

inline Mass mass_of(float weight) { return Mass(weight * kWhole); }

// Room for the buckets of the first digit.
constexpr int64_t kBuckets = 1 << 12;

// The largest value of which it and those above together weigh at least `goal`; that must be within
// 1 and what all weigh. Values are at most 0 (or -0).
//
// A radix search from the top digit of the values' bits down: below 0, floats sort as integers do,
// the smallest first. `places` [n] and `buckets` [kBuckets] are scratch.
template <typename MassAt>
float least_kept(const float* values, int64_t n, Mass goal, MassAt mass_at, int32_t* places, Mass* buckets) {
  struct Digit {
    int shift, bits;
  };
  constexpr Digit kDigits[] = {{19, 12}, {9, 10}, {0, 9}};  // without the sign
  const auto digit_at = [&](int64_t place, Digit digit) {
    uint32_t bits;
    std::memcpy(&bits, values + place, sizeof(bits));
    return int64_t(bits >> digit.shift & ((1u << digit.bits) - 1));
  };
  int64_t left = n;
  for (const Digit digit : kDigits) {
    const bool whole = digit.shift == kDigits[0].shift;
    std::memset(buckets, 0, sizeof(Mass) << digit.bits);
    for (int64_t i = 0; i < left; ++i) {
      const int64_t place = whole ? i : places[i];
      buckets[digit_at(place, digit)] += mass_at(place);
    }
    int64_t chosen = 0;
    for (; buckets[chosen] < goal; ++chosen) goal -= buckets[chosen];
    int64_t kept = 0;
    for (int64_t i = 0; i < left; ++i) {
      const int64_t place = whole ? i : places[i];
      places[kept] = int32_t(place);
      kept += digit_at(place, digit) == chosen;
    }
    left = kept;
  }
  return values[places[0]];  // all that are left are equal
}

}  // namespace hexserve
