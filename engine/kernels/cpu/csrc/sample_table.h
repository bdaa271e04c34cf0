// The loops over a row's logits. Every instruction set gives the same bits: each value by the same
// operations, and no sum of floats.

#pragma once

#include <cstdint>

namespace hexserve {

struct Largest {
  float value;  // NaN if there is one
  int64_t index;  // the first that has it
};

// See engine/sampling.py.
struct Penalties {
  float presence, frequency, repetition;
};

struct Scaling {
  float largest, temperature, least;
};

struct NoiseOf {
  uint32_t seed_high, seed_low;
  int32_t choice, position;
};

// Lists need room for so many more than they come to hold.
constexpr int64_t kListSlack = 16;

struct SampleTable {
  Largest (*largest)(const float* x, int64_t n);
  void (*penalize)(const float* x, const int32_t* counts, Penalties penalties, float* y, int64_t n);
  // Lists (x[i] - largest) / temperature and i where that is at least `least`; returns how many.
  int64_t (*scale)(const float* x, int64_t n, Scaling scaling, float* values, int32_t* ids);
  // Removes from the lists what is below `least`; returns how many are left.
  int64_t (*keep)(float* values, int32_t* ids, int64_t n, float least);
  // y[i] = e^(x[i] - offset)
  void (*weigh)(const float* x, int64_t n, float offset, float* y);
  // The token of the largest value + Gumbel noise, of equals the lowest; 0 if there is no token.
  int32_t (*draw)(const float* values, const int32_t* ids, int64_t n, NoiseOf noise);
  // Lists the i with low <= x[i] <= high; returns how many.
  int64_t (*find_within)(const float* x, int64_t n, float low, float high, int32_t* places);
  // The first i >= begin where x[i] > bound or one of them is NaN; n if there is none.
  int64_t (*find_above)(const float* x, int64_t begin, int64_t n, float bound);
  // Of a normal number above 0.
  float (*log)(float x);
};

}  // namespace hexserve
