// The inner loops of attention: one piece of KV against a few queries.
//
// The KV of a row is cut into pieces of kPiece positions, from position 0 on. What a query gets
// from one piece, and how it merges the pieces, in increasing order, is the same whatever other
// queries are computed with it and whoever computes the pieces.

#pragma once

#include <cstdint>

namespace hexserve {

constexpr int64_t kPiece = 128;
// Results per query are padded to whole vectors of any instruction set.
constexpr int64_t kWidest = 16;
// Most columns in one strip of packed values.
constexpr int64_t kWidestStrip = 32;

// Scores and mixes of values are sums of steps: of one product in float32 where the queries or the
// pools are, of two at once where both are bfloat16; then the weights of values are rounded to it.
struct Pair {
  uint16_t bits[2];
};
template <typename Step>
constexpr int64_t kPerStep = 1;
template <>
inline constexpr int64_t kPerStep<Pair> = 2;

// Keys [begin, end) of a piece; none if begin >= end.
struct Keys {
  int64_t begin, end;
};

// Row t of a piece lies at base + offsets[t].
template <typename T>
struct Rows {
  const T* base;
  const int64_t* offsets;
};

// A walk over rows that are needed soon, first of keys and then of values, in the order of memory.
// Loops go on by a few lines for each few rows, dimensions or keys, all of them about as fast as they
// read: a loop that went on faster would wait for memory.
struct Ahead {
  const char* base;
  const int64_t* offsets;  // of the `rows` left, in elements
  int64_t rows, row_bytes, element_bytes;
  const char *line, *end;  // within the row under way
  const char* values;      // null once they are under way
  const int64_t* first;    // the offsets of all `count` rows
  int64_t count;
  int64_t pace;
};

// What queries got so far: the mix of values is mixed / sum, both relative to e^top.
struct Mixed {
  float* top;    // [queries]; -inf where nothing was seen
  float* sum;    // [queries]
  float* mixed;  // [queries, width], width being head_dim padded to kWidest
};

struct Scoring {
  int64_t head_dim;
  float scale;
  float soft_cap;  // 0 is none
};

// Keys as [strips, steps of head_dim, keys of a strip]. Reads `keys` alone, and puts copies of the
// first or the last in the places of others in their strips.
template <typename T, typename Step>
using PackKeys = void (*)(Rows<T> rows, Keys keys, int64_t head_dim, Step* packed, Ahead& ahead);

// Values as [strips of columns, steps of kPiece, columns of a strip]; zeros beside `keys` in a step.
template <typename T, typename Step>
using PackValues = void (*)(Rows<T> rows, Keys keys, int64_t head_dim, Step* packed);

// queries [steps of head_dim, count] over the keys that each of them sees. Values are taken from
// `packed_values` where that is not null.
template <typename T, typename Step>
using Attend = void (*)(const Scoring& scoring, const Step* queries, int64_t count, const Keys* seen,
                        const Step* packed_keys, Rows<T> values, const Step* packed_values, Mixed result,
                        Ahead& ahead);

// Brings all of a walk near at once.
using Fetch = void (*)(Ahead ahead);

// into[q] merges with the next piece.
using Merge = void (*)(Mixed into, Mixed piece, int64_t count, int64_t head_dim);

template <typename T>
using Finish = void (*)(const float* mixed, float sum, T* out, int64_t head_dim);

// Pools of type T.
template <typename T, typename Step>
struct PieceTable {
  PackKeys<T, Step> pack_keys;
  PackValues<T, Step> pack_values;
  Attend<T, Step> attend;
};

struct AttentionTable {
  int64_t queries;  // most in one call of `attend`
  int64_t strip;    // keys or columns of a strip
  PieceTable<float, float> f32;
  PieceTable<uint16_t, float> widened;
  PieceTable<uint16_t, Pair> bf16;
  Fetch fetch;
  Merge merge;
  Finish<float> finish_f32;
  Finish<uint16_t> finish_bf16;
};

}  // namespace hexserve
