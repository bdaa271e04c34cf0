// How far down the likeliest tokens go until they weigh enough: for top-k, each weighs 1; for
// top-p, its probability.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>

#include "sample_table.h"

namespace hexserve {

// Weights are whole numbers: their sums are exact, so that no order of them differs. e^0 is kWhole,
// and as many as kMostTokens of it can be added.
using Mass = int64_t;
constexpr float kWhole = 1099511627776.0f;  // 2^40
constexpr int64_t kMostTokens = int64_t(1) << 22;

inline Mass mass_of(float weight) { return Mass(weight * kWhole); }

// Finds the least value of which it and those above together weigh enough.
//
// A radix search from the top digit of the values' bits down. Values are finite and at most 0 (or
// -0), and no denormals: so their bits sort as integers do, the likeliest first.
class LeastKept {
 public:
  // Scratch: [n + kListSlack] and [kBuckets].
  static constexpr int64_t kBuckets = 1 << 12;
  LeastKept(const SampleTable& table, int32_t* places, Mass* buckets)
      : table_(table), places_(places), buckets_(buckets) {}

  // mass_at(place) is what values[place] weighs, goal_of(what all weigh) is how much is enough: from
  // 1 to that.
  template <typename MassAt, typename GoalOf>
  float find(const float* values, int64_t n, MassAt mass_at, GoalOf goal_of) {
    constexpr Digit kTop = {19, 12}, kLower[] = {{9, 10}, {0, 9}};  // without the sign
    clear(kTop);
    for (int64_t place = 0; place < n; ++place) {
      buckets_[digit_of(bits_of(values[place]), kTop)] += mass_at(place);
    }
    Mass goal = goal_of(std::accumulate(buckets_, buckets_ + kBuckets, Mass(0)));
    const uint32_t top = choose(goal) << kTop.shift, rest = (1u << kTop.shift) - 1;
    int64_t left = table_.find_within(values, n, -float_of(top | rest), -float_of(top), places_);
    for (const Digit digit : kLower) {
      clear(digit);
      for (int64_t i = 0; i < left; ++i) {
        buckets_[digit_of(bits_of(values[places_[i]]), digit)] += mass_at(places_[i]);
      }
      const uint32_t chosen = choose(goal);
      int32_t* const end = std::remove_if(places_, places_ + left, [&](int32_t place) {
        return digit_of(bits_of(values[place]), digit) != chosen;
      });
      left = end - places_;
    }
    return values[places_[0]];  // all that are left are equal
  }

 private:
  struct Digit {
    int shift, bits;
  };

  static uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
  }
  static float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
  static uint32_t digit_of(uint32_t bits, Digit digit) {
    return bits >> digit.shift & ((1u << digit.bits) - 1);
  }

  void clear(Digit digit) { std::fill_n(buckets_, int64_t(1) << digit.bits, Mass(0)); }

  // The bucket in which the goal is reached; the goal becomes what it has to give.
  uint32_t choose(Mass& goal) const {
    uint32_t bucket = 0;
    for (; buckets_[bucket] < goal; ++bucket) goal -= buckets_[bucket];
    return bucket;
  }

  const SampleTable& table_;
  int32_t* const places_;
  Mass* const buckets_;
};

}  // namespace hexserve
