// One piece of KV against a few queries; see attention_table.h. Included by isa.cc.
//
// Scores have keys in their lanes and are chains of kChain steps over the dimensions, added up in
// order; mixed values have dimensions in their lanes and are one chain of steps over the keys. That
// chain holds exactly the keys that its query sees, so that a key unseen may be anything, NaN too.

#pragma once

#include <math.h>

namespace hexserve {
namespace HEXSERVE_ISA {

constexpr int kStrip = 2 * kLanes;
// The longer a chain, the more its rounding adds up: one over 256 dimensions would cost a digit.
constexpr int64_t kChain = 64;
// Rows for each part of a walk: its lines come one by one, and a burst of them would be waited for.
constexpr int64_t kTogether = 4;
// With two vectors of each, and two more of what they are multiplied by, these fill the registers.
constexpr int kQueries = kLanes == 16 ? 12 : 6;
static_assert(kStrip <= kWidestStrip && kPiece % kStrip == 0 && kWidest % kLanes == 0);

// Brings `count` more lines into the second level: the first is full of the piece under way. A call
// would put the vectors of the loops around it away, so it is inlined.
__attribute__((always_inline)) static inline void walk(Ahead& ahead, int64_t count) {
  while (count > 0) {
    if (ahead.line >= ahead.end) {
      if (ahead.rows == 0) {
        if (ahead.values == nullptr) return;
        ahead.base = ahead.values;
        ahead.values = nullptr;
        ahead.offsets = ahead.first;
        ahead.rows = ahead.count;
        continue;
      }
      --ahead.rows;
      ahead.line = ahead.base + *ahead.offsets++ * ahead.element_bytes;
      ahead.end = ahead.line + ahead.row_bytes;
    }
    const char* line = ahead.line;
    for (; count > 0 && line < ahead.end; line += kLine, --count) prefetch_l2(line);
    ahead.line = line;
  }
}

static inline Pairs load_step(const Pair* p) { return load_pairs(p->bits); }
static inline Pairs broadcast_step(const Pair* p) { return broadcast_pair(p->bits); }
static inline void store_step(Pair* p, Pairs x) { store_pairs(p->bits, x); }

// A mask costs nothing where vectors are of 16, but much where bfloat16 has none.
template <typename T>
static inline Vec load_columns(const T* p, int64_t n) {
  return kLanes == 8 && n >= kLanes ? load(p) : load_first(p, n);
}

// Half as many as kTogether vectors have: packing keys is a quarter of the work.
constexpr int64_t kRowLines = kTogether * kLanes * sizeof(float) / kLine / 2;

// One vector of keys: step d of rows[i] goes to packed[d * kStrip + i]. Words of 32 bits move, which
// are steps unless they are widened.
template <typename T, typename Step>
static inline void transpose_rows(const T* const (&rows)[kLanes], int64_t head_dim, Step* packed,
                                  Ahead& ahead) {
  constexpr int64_t kPerWord = sizeof(float) / sizeof(T);
  const int64_t words = head_dim / kPerWord;
  for (int64_t w = 0; w < words; w += kLanes) {
    Vec tile[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      if (i % kTogether == 0) walk(ahead, kRowLines);
      tile[i] = load_first((const float*)rows[i] + w, words - w);
    }
    transpose(tile);
    for (int i = 0; i < kLanes && w + i < words; ++i) {
      float* place = (float*)packed + (w + i) * kPerWord / kPerStep<Step> * kStrip;
      if constexpr (kPerWord == kPerStep<Step>) {
        store(place, tile[i]);
      } else {
        store(place, first_of_pairs(tile[i]));
        store(place + kStrip, second_of_pairs(tile[i]));
      }
    }
  }
}

template <typename T, typename Step>
static void pack_keys(Rows<T> rows, Keys keys, int64_t head_dim, Step* packed, Ahead& ahead) {
  for (int64_t t = keys.begin / kStrip * kStrip; t < keys.end; t += kStrip) {
    for (int64_t half = 0; half < kStrip; half += kLanes) {
      const T* near[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        const int64_t key = t + half + i;
        const int64_t kept = key < keys.begin ? keys.begin : key < keys.end ? key : keys.end - 1;
        near[i] = rows.base + rows.offsets[kept];
      }
      transpose_rows(near, head_dim, packed + t * head_dim / kPerStep<Step> + half, ahead);
    }
  }
}

// Values of one strip of columns, from the rows of a pool: those beside `keys` are zeros.
template <typename T, typename Step>
struct PooledStrip {
  Rows<T> rows;
  Keys keys;
  int64_t columns;

  auto load(int64_t step, int64_t column) const {
    if constexpr (kPerStep<Step> == 1) {
      return load_columns(rows.base + rows.offsets[step] + column, columns - column);
    } else {
      return pair_up(row(2 * step) + column, row(2 * step + 1) + column, columns - column);
    }
  }
  const T* row(int64_t key) const {
    static constexpr T kZeros[kStrip] = {};
    return key >= keys.begin && key < keys.end ? rows.base + rows.offsets[key] : kZeros;
  }
};

template <typename Step>
struct PackedStrip {
  const Step* values;

  auto load(int64_t step, int64_t column) const { return load_step(values + step * kStrip + column); }
};

template <typename T, typename Step>
static inline PooledStrip<T, Step> strip_of(Rows<T> rows, Keys keys, int64_t column, int64_t head_dim) {
  return {{rows.base + column, rows.offsets}, keys, head_dim - column};
}

template <typename Step>
constexpr int64_t kPieceSteps = kPiece / kPerStep<Step>;
template <typename Step>
static inline int64_t first_step(Keys keys) {
  return keys.begin / kPerStep<Step>;
}
template <typename Step>
static inline int64_t end_step(Keys keys) {
  return (keys.end + kPerStep<Step> - 1) / kPerStep<Step>;
}

template <typename T, typename Step>
static void pack_values(Rows<T> rows, Keys keys, int64_t head_dim, Step* packed) {
  for (int64_t step = first_step<Step>(keys); step < end_step<Step>(keys); ++step) {
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      const auto strip = strip_of<T, Step>(rows, keys, d / kStrip * kStrip, head_dim);
      Step* place = packed + (d / kStrip * kPieceSteps<Step> + step) * kStrip + d % kStrip;
      store_step(place, strip.load(step, d % kStrip));
    }
  }
}

// scores[q, key] of one strip of keys.
template <int N, typename Step>
static void score(const Step* queries, const Step* keys, int64_t steps, float* scores, Ahead& ahead) {
  for (int64_t begin = 0; begin < steps; begin += kChain) {
    const int64_t end = begin + kChain < steps ? begin + kChain : steps;
    Vec sums[N][2];
#pragma GCC unroll 12
    for (int q = 0; q < N; ++q) sums[q][0] = sums[q][1] = zero();
    for (int64_t d = begin; d < end; ++d) {
      if (d % kTogether == 0) walk(ahead, ahead.pace);
      const auto low = in_register(load_step(keys + d * kStrip));
      const auto high = in_register(load_step(keys + d * kStrip + kLanes));
#pragma GCC unroll 12
      for (int q = 0; q < N; ++q) {
        const auto query = broadcast_step(queries + d * N + q);
        sums[q][0] = multiply_add(query, low, sums[q][0]);
        sums[q][1] = multiply_add(query, high, sums[q][1]);
      }
    }
#pragma GCC unroll 12
    for (int q = 0; q < N; ++q) {
      for (int half = 0; half < 2; ++half) {
        float* place = scores + q * kPiece + half * kLanes;
        store(place, begin == 0 ? sums[q][half] : add(load(place), sums[q][half]));
      }
    }
  }
}

// Weights e^(score - top) of one query, zero where it does not see. The sum is that of the weights
// as they are stored.
template <typename Weight>
static inline void soften(const Scoring& scoring, Keys seen, float* scores, Weight* weights, float* top,
                          float* sum) {
  const Vec unseen = broadcast(-INFINITY), scale = broadcast(scoring.scale);
  const Vec cap = broadcast(scoring.soft_cap);
  const int64_t first = seen.begin / kLanes * kLanes;
  Vec tops = unseen;
  for (int64_t t = first; t < seen.end; t += kLanes) {
    Vec s = mul(load(scores + t), scale);
    if (scoring.soft_cap != 0) s = mul(tanh(div(s, cap)), cap);
    s = keep_first(unseen, keep_first(s, unseen, seen.end - t), seen.begin - t);
    store(scores + t, s);
    tops = max(tops, s);
  }
  *top = max_lanes(tops);
  const Vec base = broadcast(*top);
  Vec sums = zero();
  for (int64_t t = first; t < seen.end; t += kLanes) {
    store(weights + t, exp(sub(load(scores + t), base)));
    sums = add(sums, load(weights + t));
  }
  *sum = sum_lanes(sums);
}

// Adds weights [N, kPiece] times values of `keys`, in C vectors of columns, to mixed [N, width].
template <int N, int C, typename Step, typename Strip>
static void mix(const Step* weights, Keys keys, Strip values, float* mixed, int64_t width, Ahead& ahead) {
  Vec sums[N][C];
#pragma GCC unroll 12
  for (int q = 0; q < N; ++q) {
    for (int c = 0; c < C; ++c) sums[q][c] = load(mixed + q * width + c * kLanes);
  }
  const int64_t last = end_step<Step>(keys);
  for (int64_t t = first_step<Step>(keys); t < last;) {
    walk(ahead, ahead.pace);
    const int64_t end = t + kTogether < last ? t + kTogether : last;
    for (; t < end; ++t) {
      decltype(values.load(t, 0)) value[C];
      for (int c = 0; c < C; ++c) value[c] = values.load(t, c * kLanes);
#pragma GCC unroll 12
      for (int q = 0; q < N; ++q) {
        const auto weight = broadcast_step(weights + q * kPieceSteps<Step> + t);
        for (int c = 0; c < C; ++c) sums[q][c] = multiply_add(weight, value[c], sums[q][c]);
      }
    }
  }
#pragma GCC unroll 12
  for (int q = 0; q < N; ++q) {
    for (int c = 0; c < C; ++c) store(mixed + q * width + c * kLanes, sums[q][c]);
  }
}

// mix over all columns; strip(d) has those from d on.
template <int N, typename Step, typename StripAt>
static void mix_strips(const Step* weights, Keys keys, StripAt strip, int64_t head_dim, float* mixed,
                       int64_t width, Ahead& ahead) {
  if (keys.begin >= keys.end) return;
  for (int64_t d = 0; d < head_dim; d += kStrip) {
    if (head_dim - d > kLanes) {
      mix<N, 2>(weights, keys, strip(d), mixed + d, width, ahead);
    } else {
      mix<N, 1>(weights, keys, strip(d), mixed + d, width, ahead);
    }
  }
}

static inline float* weights_of(float* steps) { return steps; }
static inline uint16_t* weights_of(Pair* steps) { return steps->bits; }

template <int N, typename T, typename Step>
static void attend(const Scoring& scoring, const Step* queries, const Keys* seen, const Step* packed_keys,
                   Rows<T> values, const Step* packed_values, Mixed result, Ahead& ahead) {
  const int64_t head_dim = scoring.head_dim, width = (head_dim + kWidest - 1) / kWidest * kWidest;
  Keys any = {kPiece, 0}, all = {0, kPiece};
  for (int q = 0; q < N; ++q) {
    result.top[q] = -INFINITY;
    result.sum[q] = 0;
    all.begin = all.begin > seen[q].begin ? all.begin : seen[q].begin;
    all.end = all.end < seen[q].end ? all.end : seen[q].end;
    if (seen[q].begin >= seen[q].end) continue;
    any.begin = any.begin < seen[q].begin ? any.begin : seen[q].begin;
    any.end = any.end > seen[q].end ? any.end : seen[q].end;
  }
  if (any.begin >= any.end) return;

  const int64_t steps = head_dim / kPerStep<Step>;
  alignas(64) float scores[N * kPiece];
  alignas(64) Step weights[N * kPieceSteps<Step>];
  for (int64_t t = any.begin / kStrip * kStrip; t < any.end; t += kStrip) {
    score<N>(queries, packed_keys + t * steps, steps, scores + t, ahead);
  }
  for (int q = 0; q < N; ++q) {
    if (seen[q].begin >= seen[q].end) continue;
    soften(scoring, seen[q], scores + q * kPiece, weights_of(weights + q * kPieceSteps<Step>), result.top + q,
           result.sum + q);
  }
  for (int64_t i = 0; i < N * width; i += kLanes) store(result.mixed + i, zero());
  // Together over the whole steps that all see; each alone over those before and after, where a step
  // may hold a key that others see.
  all = {end_step<Step>({0, all.begin}) * kPerStep<Step>, first_step<Step>({all.end, 0}) * kPerStep<Step>};
  if (all.begin >= all.end) all = {kPiece, kPiece};
  const auto pooled = [&](Keys keys) {
    return [=](int64_t d) { return strip_of<T, Step>(values, keys, d, head_dim); };
  };
  const auto alone = [&](int q, int64_t begin, int64_t end) {
    const Keys keys = {begin > seen[q].begin ? begin : seen[q].begin, end < seen[q].end ? end : seen[q].end};
    mix_strips<1>(weights + q * kPieceSteps<Step>, keys, pooled(keys), head_dim, result.mixed + q * width,
                  width, ahead);
  };
  for (int q = 0; q < N; ++q) alone(q, 0, all.begin);
  if (packed_values != nullptr) {
    const auto packed = [=](int64_t d) { return PackedStrip<Step>{packed_values + d * kPieceSteps<Step>}; };
    mix_strips<N>(weights, all, packed, head_dim, result.mixed, width, ahead);
  } else {
    mix_strips<N>(weights, all, pooled(all), head_dim, result.mixed, width, ahead);
  }
  for (int q = 0; q < N; ++q) alone(q, all.end, kPiece);
}

// The count of queries becomes a constant, so that their sums stay in registers.
template <typename T, typename Step, int N = kQueries>
static void attend_any(const Scoring& scoring, const Step* queries, int64_t count, const Keys* seen,
                       const Step* packed_keys, Rows<T> values, const Step* packed_values, Mixed result,
                       Ahead& ahead) {
  if constexpr (N > 1) {
    if (count < N) {
      return attend_any<T, Step, N - 1>(scoring, queries, count, seen, packed_keys, values, packed_values,
                                        result, ahead);
    }
  }
  attend<N>(scoring, queries, seen, packed_keys, values, packed_values, result, ahead);
}

static void fetch(Ahead ahead) { walk(ahead, INT64_MAX); }

static void merge(Mixed into, Mixed piece, int64_t count, int64_t head_dim) {
  const int64_t width = (head_dim + kWidest - 1) / kWidest * kWidest;
  for (int64_t q = 0; q < count; ++q) {
    if (piece.top[q] == -INFINITY) continue;
    const float top = into.top[q] > piece.top[q] ? into.top[q] : piece.top[q];
    const Vec faded = exp(broadcast(into.top[q] - top)), added = exp(broadcast(piece.top[q] - top));
    const Vec sum = fma(broadcast(piece.sum[q]), added, mul(broadcast(into.sum[q]), faded));
    into.top[q] = top;
    store_first(into.sum + q, sum, 1);
    for (int64_t d = 0; d < width; d += kLanes) {
      float* place = into.mixed + q * width + d;
      store(place, fma(load(piece.mixed + q * width + d), added, mul(load(place), faded)));
    }
  }
}

template <typename T>
static void finish(const float* mixed, float sum, T* out, int64_t head_dim) {
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    store_first(out + d, div(load(mixed + d), broadcast(sum)), head_dim - d);
  }
}

constexpr AttentionTable kAttention = {
    kQueries,
    kStrip,
    {pack_keys<float, float>, pack_values<float, float>, attend_any<float, float>},
    {pack_keys<uint16_t, float>, pack_values<uint16_t, float>, attend_any<uint16_t, float>},
    {pack_keys<uint16_t, Pair>, pack_values<uint16_t, Pair>, attend_any<uint16_t, Pair>},
    fetch,
    merge,
    finish<float>,
    finish<uint16_t>,
};

}  // namespace HEXSERVE_ISA
}  // namespace hexserve
