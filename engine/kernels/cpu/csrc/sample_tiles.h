// The loops over a row's logits; see sample_table.h. Included by isa.cc.

#pragma once

#include <math.h>

namespace hexserve {
namespace HEXSERVE_ISA {

static inline Vec load_or(const float* p, int64_t n, float rest) {
  return n >= kLanes ? load(p) : keep_first(load_first(p, n), broadcast(rest), n);
}

// The first lane of x[begin, end) that `test` finds; end if there is none.
template <typename Test>
static int64_t first_that(const float* x, int64_t begin, int64_t end, Test test) {
  for (int64_t i = begin; i < end; i += kLanes) {
    const Lanes found = test(load_first(x + i, end - i)) & first_lanes(end - i);
    if (found != 0) return i + __builtin_ctz(found);
  }
  return end;
}

// Stretch by stretch, so that only one is searched for where the largest is.
static Largest largest(const float* x, int64_t n) {
  constexpr int64_t kStretch = 1024, kAtOnce = 4;
  Largest best = {-INFINITY, 0};
  int64_t at = 0;
  for (int64_t begin = 0; begin < n; begin += kStretch) {
    const int64_t end = begin + kStretch < n ? begin + kStretch : n;
    Vec most[kAtOnce];
    for (Vec& each : most) each = broadcast(-INFINITY);
    Lanes nans = 0;
    int64_t i = begin;
    for (; i + kAtOnce * kLanes <= end; i += kAtOnce * kLanes) {
      for (int64_t j = 0; j < kAtOnce; ++j) {
        const Vec v = load(x + i + j * kLanes);
        nans |= is_nan(v);
        most[j] = max(v, most[j]);
      }
    }
    for (; i < end; i += kLanes) {
      const Vec v = load_or(x + i, end - i, -INFINITY);
      nans |= is_nan(v);
      most[0] = max(v, most[0]);
    }
    if (nans != 0) return {NAN, first_that(x, begin, end, [](Vec v) { return is_nan(v); })};
    const float value = max_lanes(max(max(most[0], most[1]), max(most[2], most[3])));
    if (value > best.value) best.value = value, at = begin;
  }
  const Vec wanted = broadcast(best.value);
  best.index = first_that(x, at, n, [=](Vec v) { return equal(v, wanted); });
  return best;
}

static void penalize(const float* x, const int32_t* counts, Penalties penalties, float* y, int64_t n) {
  const Vec repetition = broadcast(penalties.repetition), frequency = broadcast(penalties.frequency);
  const Vec presence = broadcast(penalties.presence);
  for (int64_t i = 0; i < n; i += kLanes) {
    const Ints count = load_first(counts + i, n - i);
    // A count is twice the times in the output, plus 1 if in the prompt.
    const Vec seen = to_floats(count), times = to_floats(shift_right<1>(count));
    Vec v = load_first(x + i, n - i);
    const Vec repeated = where_less(zero(), v, div(v, repetition), mul(v, repetition));
    v = sub(where_less(zero(), seen, repeated, v), mul(frequency, times));
    store_first(y + i, sub(v, where_less(zero(), times, presence, zero())), n - i);
  }
}

static int64_t scale(const float* x, int64_t n, Scaling scaling, float* values, int32_t* ids) {
  const Vec most = broadcast(scaling.largest), temperature = broadcast(scaling.temperature);
  const Vec least = broadcast(scaling.least);
  int64_t kept = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec v = div(sub(load_first(x + i, n - i), most), temperature);
    const Lanes lanes = at_least(v, least) & first_lanes(n - i);
    if (lanes == 0) continue;
    store_lanes(values + kept, v, lanes);
    kept += store_lanes(ids + kept, lane_numbers() + broadcast_int(uint32_t(i)), lanes);
  }
  return kept;
}

static int64_t keep(float* values, int32_t* ids, int64_t n, float least) {
  const Vec bound = broadcast(least);
  int64_t kept = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec v = load_first(values + i, n - i);
    const Ints id = load_first(ids + i, n - i);
    const Lanes lanes = at_least(v, bound) & first_lanes(n - i);
    if (lanes == 0) continue;
    // What this overwrites has been read: no more is kept than was.
    store_lanes(values + kept, v, lanes);
    kept += store_lanes(ids + kept, id, lanes);
  }
  return kept;
}

static void weigh(const float* x, int64_t n, float offset, float* y) {
  const Vec from = broadcast(offset);
  for (int64_t i = 0; i < n; i += kLanes) {
    store_first(y + i, exp(sub(load_first(x + i, n - i), from)), n - i);
  }
}

static int32_t draw(const float* values, const int32_t* ids, int64_t n, NoiseOf noise) {
  const Key key = fold_in(fold_in({noise.seed_high, noise.seed_low}, noise.choice), noise.position);
  Vec best = broadcast(-INFINITY);
  Ints best_ids = broadcast_int(0);
  for (int64_t i = 0; i < n; i += kLanes) {
    const Ints id = load_first(ids + i, n - i);
    const Ints bits = random_bits(key, id);
    Vec v = load_or(values + i, n - i, -INFINITY);
    // Most tokens have no chance beside the best of their lane.
    if (at_least(add(v, above_gumbel(bits)), best) == 0) continue;
    v = add(v, gumbel(bits));
    best_ids = as_ints(where_less(best, v, as_floats(id), as_floats(best_ids)));
    best = max(v, best);
  }
  float lane_values[kLanes];
  int32_t lane_ids[kLanes];
  store(lane_values, best);
  store_ints(lane_ids, best_ids);
  int found = 0;
  for (int lane = 1; lane < kLanes; ++lane) {
    const float value = lane_values[lane], other = lane_values[found];
    if (value > other || (value == other && lane_ids[lane] < lane_ids[found])) found = lane;
  }
  return lane_ids[found];
}

static int64_t find_within(const float* x, int64_t n, float low, float high, int32_t* places) {
  const Vec lowest = broadcast(low), highest = broadcast(high);
  int64_t found = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec v = load_first(x + i, n - i);
    const Lanes lanes = at_least(v, lowest) & at_least(highest, v) & first_lanes(n - i);
    if (lanes != 0) found += store_lanes(places + found, lane_numbers() + broadcast_int(uint32_t(i)), lanes);
  }
  return found;
}

static int64_t find_above(const float* x, int64_t begin, int64_t n, float bound) {
  const Vec limit = broadcast(bound);
  return first_that(x, begin, n, [=](Vec v) { return not_at_most(v, limit); });
}

constexpr SampleTable kSample = {largest, penalize, scale, keep, weigh, draw, find_within, find_above, log};

}  // namespace HEXSERVE_ISA
}  // namespace hexserve
