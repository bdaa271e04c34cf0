// One piece of KV against a few queries; see attention_table.h. Included by isa.cc.
//
// Scores have keys in their lanes and are one chain of FMAs over the dimensions; mixed values
// have dimensions in their lanes and are one chain over the keys. A chain holds exactly the keys
// that its query sees, so that a key unseen may be anything, NaN too.

#pragma once

#include <cmath>

namespace hexserve {
namespace HEXSERVE_ISA {

constexpr int kStrip = 2 * kLanes;
constexpr int64_t kLine = 64;  // bytes
// Rows for each part of a walk: its lines come one by one, and a burst of them would be waited for.
constexpr int64_t kTogether = 4;
// With two vectors of each, and two more of what they are multiplied by, these fill the registers.
constexpr int kQueries = kLanes == 16 ? 12 : 6;
static_assert(kStrip <= kWidestStrip && kPiece % kStrip == 0 && kWidest % kLanes == 0);

// Brings `count` more lines into the second level: the first is full of the piece under way.
static void walk(Ahead& ahead, int64_t count) {
  while (count > 0) {
    if (ahead.line >= ahead.end) {
      if (ahead.rows == 0) return;
      --ahead.rows;
      ahead.line = ahead.base + *ahead.offsets++ * ahead.element_bytes;
      ahead.end = ahead.line + ahead.row_bytes;
    }
    const char* line = ahead.line;
    for (; count > 0 && line < ahead.end; line += kLine, --count) _mm_prefetch(line, _MM_HINT_T1);
    ahead.line = line;
  }
}

// head_dim is a multiple of 8, so that vectors of 8 are always whole.
template <typename T>
static inline Vec load_columns(const T* p, int64_t n) {
  return kLanes == 8 ? load(p) : load_first(p, n);
}

// Lines of kTogether vectors.
constexpr int64_t kRowLines = kTogether * kLanes * sizeof(float) / kLine;

// One vector of keys: packed[d * kStrip + i] = rows[i][d].
static inline void transpose_rows(const float* const (&rows)[kLanes], int64_t head_dim, float* packed,
                                  Ahead& ahead) {
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    Vec tile[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      if (i % kTogether == 0) walk(ahead, kRowLines);
      tile[i] = load_columns(rows[i] + d, head_dim - d);
    }
    transpose(tile);
    for (int i = 0; i < kLanes && d + i < head_dim; ++i) store(packed + (d + i) * kStrip, tile[i]);
  }
}

// Two dimensions move at a time.
static inline void transpose_rows(const uint16_t* const (&rows)[kLanes], int64_t head_dim, float* packed,
                                  Ahead& ahead) {
  const int64_t pairs = head_dim / 2;
  for (int64_t p = 0; p < pairs; p += kLanes) {
    Vec tile[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      if (i % kTogether == 0) walk(ahead, kRowLines);
      tile[i] = load_first((const float*)(rows[i] + 2 * p), pairs - p);
    }
    transpose(tile);
    for (int i = 0; i < kLanes && p + i < pairs; ++i) {
      store(packed + 2 * (p + i) * kStrip, first_of_pairs(tile[i]));
      store(packed + (2 * (p + i) + 1) * kStrip, second_of_pairs(tile[i]));
    }
  }
}

template <typename T>
static void pack_keys(Rows<T> rows, Keys keys, int64_t head_dim, float* packed, Ahead& ahead) {
  for (int64_t t = keys.begin / kStrip * kStrip; t < keys.end; t += kStrip) {
    for (int64_t half = 0; half < kStrip; half += kLanes) {
      const T* near[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        const int64_t key = t + half + i;
        const int64_t kept = key < keys.begin ? keys.begin : key < keys.end ? key : keys.end - 1;
        near[i] = rows.base + rows.offsets[kept];
      }
      transpose_rows(near, head_dim, packed + t * head_dim + half, ahead);
    }
  }
}

template <typename T>
static void pack_values(Rows<T> rows, Keys keys, int64_t head_dim, float* packed) {
  for (int64_t t = keys.begin; t < keys.end; ++t) {
    const T* row = rows.base + rows.offsets[t];
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      float* place = packed + (d / kStrip * kPiece + t) * kStrip + d % kStrip;
      store(place, load_columns(row + d, head_dim - d));
    }
  }
}

// scores[q, key] of one strip of keys.
template <int N>
static void score(const float* queries, const float* keys, int64_t head_dim, float* scores, Ahead& ahead) {
  Vec sums[N][2];
#pragma GCC unroll 12
  for (int q = 0; q < N; ++q) sums[q][0] = sums[q][1] = zero();
  for (int64_t d = 0; d < head_dim; ++d) {
    if (d % kTogether == 0) walk(ahead, ahead.pace);
    const Vec low = in_register(load(keys + d * kStrip));
    const Vec high = in_register(load(keys + d * kStrip + kLanes));
#pragma GCC unroll 12
    for (int q = 0; q < N; ++q) {
      const Vec query = broadcast(queries[d * N + q]);
      sums[q][0] = fma(query, low, sums[q][0]);
      sums[q][1] = fma(query, high, sums[q][1]);
    }
  }
#pragma GCC unroll 12
  for (int q = 0; q < N; ++q) {
    store(scores + q * kPiece, sums[q][0]);
    store(scores + q * kPiece + kLanes, sums[q][1]);
  }
}

// Scores of one query become weights e^(score - top), zero where it does not see.
static inline void soften(const Scoring& scoring, Keys seen, float* scores, float* top, float* sum) {
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
    const Vec weight = exp(sub(load(scores + t), base));
    store(scores + t, weight);
    sums = add(sums, weight);
  }
  *sum = sum_lanes(sums);
}

// Adds weights [N, kPiece] times values of `keys`, in C vectors of columns, to mixed [N, width].
template <int N, int C, typename T>
static void mix(const float* weights, Keys keys, Rows<T> values, int64_t columns, float* mixed,
                int64_t width, Ahead& ahead) {
  Vec sums[N][C];
#pragma GCC unroll 12
  for (int q = 0; q < N; ++q) {
    for (int c = 0; c < C; ++c) sums[q][c] = load(mixed + q * width + c * kLanes);
  }
  for (int64_t t = keys.begin; t < keys.end;) {
    walk(ahead, ahead.pace);
    const int64_t end = t + kTogether < keys.end ? t + kTogether : keys.end;
    for (; t < end; ++t) {
      const T* row = values.base + values.offsets[t];
      Vec value[C];
      for (int c = 0; c < C; ++c) value[c] = load_columns(row + c * kLanes, columns - c * kLanes);
#pragma GCC unroll 12
      for (int q = 0; q < N; ++q) {
        const Vec weight = broadcast(weights[q * kPiece + t]);
        for (int c = 0; c < C; ++c) sums[q][c] = fma(weight, value[c], sums[q][c]);
      }
    }
  }
#pragma GCC unroll 12
  for (int q = 0; q < N; ++q) {
    for (int c = 0; c < C; ++c) store(mixed + q * width + c * kLanes, sums[q][c]);
  }
}

// mix over all columns.
template <int N, typename T>
static void mix_strips(const float* weights, Keys keys, Values<T> values, int64_t head_dim, float* mixed,
                       int64_t width, Ahead& ahead) {
  if (keys.begin >= keys.end) return;
  for (int64_t d = 0; d < head_dim; d += kStrip) {
    const Rows<T> strip = {values.rows.base + d / kStrip * values.stride, values.rows.offsets};
    if (head_dim - d > kLanes) {
      mix<N, 2>(weights, keys, strip, head_dim - d, mixed + d, width, ahead);
    } else {
      mix<N, 1>(weights, keys, strip, head_dim - d, mixed + d, width, ahead);
    }
  }
}

template <int N, typename T>
static void attend(const Scoring& scoring, const float* queries, const Keys* seen,
                   const float* packed_keys, Values<T> values, Mixed result, Ahead& ahead) {
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

  alignas(64) float weights[N * kPiece];
  for (int64_t t = any.begin / kStrip * kStrip; t < any.end; t += kStrip) {
    score<N>(queries, packed_keys + t * head_dim, head_dim, weights + t, ahead);
  }
  for (int q = 0; q < N; ++q) {
    if (seen[q].begin >= seen[q].end) continue;
    soften(scoring, seen[q], weights + q * kPiece, result.top + q, result.sum + q);
  }
  for (int64_t i = 0; i < N * width; i += kLanes) store(result.mixed + i, zero());
  // Together over the keys that all see; each alone over those before and after.
  if (all.begin >= all.end) all = {kPiece, kPiece};
  const auto alone = [&](int q, int64_t begin, int64_t end) {
    const Keys keys = {begin > seen[q].begin ? begin : seen[q].begin, end < seen[q].end ? end : seen[q].end};
    mix_strips<1>(weights + q * kPiece, keys, values, head_dim, result.mixed + q * width, width, ahead);
  };
  for (int q = 0; q < N; ++q) alone(q, 0, all.begin);
  mix_strips<N>(weights, all, values, head_dim, result.mixed, width, ahead);
  for (int q = 0; q < N; ++q) alone(q, all.end, kPiece);
}

// The count of queries becomes a constant, so that their sums stay in registers.
template <typename T, int N = kQueries>
static void attend_any(const Scoring& scoring, const float* queries, int64_t count, const Keys* seen,
                       const float* packed_keys, Values<T> values, Mixed result, Ahead& ahead) {
  if constexpr (N > 1) {
    if (count < N) {
      return attend_any<T, N - 1>(scoring, queries, count, seen, packed_keys, values, result, ahead);
    }
  }
  attend<N>(scoring, queries, seen, packed_keys, values, result, ahead);
}

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
    {pack_keys<float>, pack_values<float>, attend_any<float>},
    {pack_keys<uint16_t>, pack_values<uint16_t>, attend_any<uint16_t>},
    merge,
    finish<float>,
    finish<uint16_t>,
};

}  // namespace HEXSERVE_ISA
}  // namespace hexserve
