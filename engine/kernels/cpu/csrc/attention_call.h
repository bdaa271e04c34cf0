// One call of attention: runs the tasks of its plan.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention_plan.h"
#include "attention_table.h"
#include "scratch.h"

namespace hexserve {

// The sizes of a call, and where its batch lies.
struct Shape {
  int64_t heads, kv_heads, group, head_dim, width;
  int64_t block_size, table_blocks;
  const int32_t* tables;
};

inline float widened(float x) { return x; }
inline float widened(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float x;
  std::memcpy(&x, &wide, sizeof x);
  return x;
}

// The step of queries of type Q over pools of type T, and `kPerStep` of a query's numbers as one.
template <typename Q, typename T>
using StepOf = std::conditional_t<std::is_same_v<Q, float> || std::is_same_v<T, float>, float, Pair>;
template <typename Q>
void make_step(const Q* query, float& step) {
  step = widened(*query);
}
inline void make_step(const uint16_t* query, Pair& step) { step = {{query[0], query[1]}}; }

inline const PieceTable<float, float>& piece_table(const AttentionTable& table, float, float) {
  return table.f32;
}
inline const PieceTable<uint16_t, float>& piece_table(const AttentionTable& table, uint16_t, float) {
  return table.widened;
}
inline const PieceTable<uint16_t, Pair>& piece_table(const AttentionTable& table, uint16_t, Pair) {
  return table.bf16;
}
inline Finish<float> finish_of(const AttentionTable& table, float) { return table.finish_f32; }
inline Finish<uint16_t> finish_of(const AttentionTable& table, uint16_t) { return table.finish_bf16; }

// One call: queries of type Q over pools of type T.
template <typename Q, typename T>
class Attention {
  using Step = StepOf<Q, T>;

 public:
  Attention(const AttentionTable& table, const Shape& shape, const Scoring& scoring,
            const Visibility& visibility, const Q* q, const T* k, const T* v, Q* out, AttentionPlan plan,
            int64_t threads)
      : threads_(threads),
        table_(table),
        pieces_(piece_table(table, T{}, Step{})),
        shape_(shape),
        scoring_(scoring),
        visibility_(visibility),
        q_(q),
        k_(k),
        v_(v),
        out_(out),
        plan_(std::move(plan)),
        part_queries_(kNarrowTokens * shape.heads),
        left_(plan_.splits.size()) {
    for (size_t i = 0; i < left_.size(); ++i) left_[i].store(plan_.splits[i].tasks);
    parts_.reset(new float[plan_.parts * part_size()]);
  }

  int64_t tasks() const { return int64_t(plan_.tasks.size()); }

  void run(int64_t index) {
    const AttentionTask& task = plan_.tasks[index];
    thread_local Scratch scratch;
    Workspace space(scratch, *this, task);
    pack_queries(task, space);
    if (task.split < 0) clear(space.state, space.queries);
    const int64_t end = task.piece + task.pieces;
    for (int64_t piece = task.piece; piece < end; ++piece) {
      const Next next = piece + 1 < end ? Next{&task, piece + 1} : next_task(index);
      attend_piece(task, piece, index < threads_ && piece == task.piece, next, space);
    }
    if (task.split >= 0) {
      // The release of each part, and the acquire of them all by the last.
      if (left_[task.split].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
      const AttentionSplit& split = plan_.splits[task.split];
      clear(space.state, space.queries);
      for (int64_t i = 0; i < split.pieces; ++i) {
        table_.merge(space.state, part(split.first_part + i), space.queries, shape_.head_dim);
      }
    }
    write(task, space.state);
  }

 private:
  // The piece that is brought near while another is under way.
  struct Next {
    const AttentionTask* task;  // nullptr for none
    int64_t piece;
  };

  // Threads take tasks in turn: the first piece of the one that this thread is likely to take.
  Next next_task(int64_t index) const {
    if (index + threads_ >= tasks()) return {nullptr, 0};
    const AttentionTask& task = plan_.tasks[index + threads_];
    return {&task, task.piece};
  }

  // A task's scratch. Its queries are ordered by kv head, token and head of the group.
  struct Workspace {
    Workspace(Scratch& scratch, const Attention& call, const AttentionTask& task)
        : per_head(task.tokens * call.shape_.group), queries(per_head * task.heads) {
      const int64_t head_dim = call.shape_.head_dim, width = call.shape_.width;
      const int64_t columns = (head_dim + kWidestStrip - 1) / kWidestStrip * kWidestStrip;
      const int64_t steps = head_dim / kPerStep<Step>;
      scratch.reset(Scratch::bytes_of<Step>(queries * steps) + bytes_of_mixed(queries, width) +
                    bytes_of_mixed(call.table_.queries, width) + Scratch::bytes_of<Step>(kPiece * steps) +
                    Scratch::bytes_of<Step>(kPiece / kPerStep<Step> * columns) +
                    Scratch::bytes_of<Keys>(per_head) + 2 * Scratch::bytes_of<int64_t>(kPiece));
      packed_queries = scratch.take<Step>(queries * steps);
      state = take_mixed(scratch, queries, width);
      from_piece = take_mixed(scratch, call.table_.queries, width);
      packed_keys = scratch.take<Step>(kPiece * steps);
      packed_values = scratch.take<Step>(kPiece / kPerStep<Step> * columns);
      seen = scratch.take<Keys>(per_head);
      offsets = scratch.take<int64_t>(kPiece);
      next_offsets = scratch.take<int64_t>(kPiece);
    }

    static int64_t bytes_of_mixed(int64_t queries, int64_t width) {
      return 2 * Scratch::bytes_of<float>(queries) + Scratch::bytes_of<float>(queries * width);
    }
    static Mixed take_mixed(Scratch& scratch, int64_t queries, int64_t width) {
      float* top = scratch.take<float>(queries);
      float* sum = scratch.take<float>(queries);
      return {top, sum, scratch.take<float>(queries * width)};
    }

    const int64_t per_head, queries;
    Step* packed_queries;  // [kv head][call of `attend`][steps of head_dim, its queries]
    Mixed state, from_piece;
    Step *packed_keys, *packed_values;
    Keys* seen;  // of the piece under way, by each query of a head
    Keys keys;   // of the piece in `offsets`, or in `next_offsets`
    int64_t *offsets, *next_offsets;
  };

  int64_t steps() const { return shape_.head_dim / kPerStep<Step>; }
  int64_t part_size() const { return part_queries_ * (2 + shape_.width); }

  Mixed part(int64_t index) const {
    float* place = parts_.get() + index * part_size();
    return {place, place + part_queries_, place + 2 * part_queries_};
  }

  Mixed from(Mixed mixed, int64_t query) const {
    return {mixed.top + query, mixed.sum + query, mixed.mixed + query * shape_.width};
  }

  void clear(Mixed state, int64_t queries) const {
    std::fill_n(state.top, queries, -std::numeric_limits<float>::infinity());
    std::fill_n(state.sum, queries, 0.0f);
    std::fill_n(state.mixed, queries * shape_.width, 0.0f);
  }

  // Calls f(first, count) for the queries of each call of `attend`, which are about as many.
  template <typename F>
  void each_call(int64_t queries, F f) const {
    const int64_t calls = (queries + table_.queries - 1) / table_.queries;
    for (int64_t i = 0; i < calls; ++i) {
      const int64_t first = queries * i / calls;
      f(first, queries * (i + 1) / calls - first);
    }
  }

  // Where the head dimensions of a query of the task begin in q and out.
  int64_t place_of(const AttentionTask& task, int64_t head, int64_t query) const {
    const int64_t token = task.token + query / shape_.group;
    const int64_t first = token * shape_.heads + (task.head + head) * shape_.group;
    return (first + query % shape_.group) * shape_.head_dim;
  }

  void pack_queries(const AttentionTask& task, const Workspace& space) const {
    for (int64_t head = 0; head < task.heads; ++head) {
      each_call(space.per_head, [&](int64_t first, int64_t count) {
        Step* packed = space.packed_queries + (head * space.per_head + first) * steps();
        for (int64_t i = 0; i < count; ++i) {
          const Q* query = q_ + place_of(task, head, first + i);
          for (int64_t d = 0; d < steps(); ++d) {
            make_step(query + d * kPerStep<Step>, packed[d * count + i]);
          }
        }
      });
    }
  }

  // `is_new`: the task before on this thread, if there was one, has not brought it near.
  void attend_piece(const AttentionTask& task, int64_t piece, bool is_new, Next next, Workspace& space) const {
    for (int64_t token = 0; token < task.tokens; ++token) {
      const Keys seen = visibility_.seen(task.position + token, piece);
      std::fill_n(space.seen + token * shape_.group, shape_.group, seen);
    }
    if (piece == task.piece) space.keys = find_rows(task, piece, space.offsets);
    const Keys keys = space.keys;
    if (is_new) table_.fetch(ahead_of(task, space.offsets, keys));
    Ahead ahead = {};
    if (next.task != nullptr) {
      space.keys = find_rows(*next.task, next.piece, space.next_offsets);
      ahead = ahead_of(*next.task, space.next_offsets, space.keys);
    }

    // Where the values of a head serve more than one call, they are laid out as steps once.
    Step* packed_values = space.per_head > table_.queries ? space.packed_values : nullptr;
    for (int64_t head = 0; head < task.heads; ++head) {
      const int64_t column = (task.head + head) * shape_.head_dim;
      const Rows<T> k = {k_ + column, space.offsets}, v = {v_ + column, space.offsets};
      pieces_.pack_keys(k, keys, shape_.head_dim, space.packed_keys, ahead);
      if (packed_values != nullptr) pieces_.pack_values(v, keys, shape_.head_dim, packed_values);
      each_call(space.per_head, [&](int64_t first, int64_t count) {
        const int64_t query = head * space.per_head + first;
        const Mixed result = task.split < 0 ? space.from_piece : from(part(part_of(task, piece)), query);
        pieces_.attend(scoring_, space.packed_queries + query * steps(), count, space.seen + first,
                       space.packed_keys, v, packed_values, result, ahead);
        if (task.split < 0) table_.merge(from(space.state, query), result, count, shape_.head_dim);
      });
    }
    table_.fetch(ahead);  // what is left: a short piece is too soon done for a long one after it
    std::swap(space.offsets, space.next_offsets);
  }

  // What the queries of the task see of a piece, and the offsets of its rows.
  Keys find_rows(const AttentionTask& task, int64_t piece, int64_t* offsets) const {
    const int32_t* blocks = shape_.tables + task.row * shape_.table_blocks;
    const int64_t size = shape_.kv_heads * shape_.head_dim, start = piece * kPiece;
    const int64_t begin = std::max(start, visibility_.first_seen(task.position));
    const int64_t end = std::min(start + kPiece, task.position + task.tokens);
    for (int64_t position = begin; position < end;) {
      const int64_t block = position / shape_.block_size, first = block * shape_.block_size;
      const int64_t shift = blocks[block] * shape_.block_size - first;
      for (; position < std::min(end, first + shape_.block_size); ++position) {
        offsets[position - start] = (position + shift) * size;
      }
    }
    return {begin - start, end - start};
  }

  // A walk over the task's heads of these rows. A quarter of it is made while the keys of the piece
  // before are packed, the rest while scoring and mixing: hence the pace.
  Ahead ahead_of(const AttentionTask& task, const int64_t* offsets, Keys keys) const {
    constexpr int64_t kSize = sizeof(T);
    const int64_t column = task.head * shape_.head_dim;
    Ahead ahead = {};
    ahead.base = reinterpret_cast<const char*>(k_ + column);
    ahead.values = reinterpret_cast<const char*>(v_ + column);
    ahead.first = ahead.offsets = offsets + keys.begin;
    ahead.count = ahead.rows = keys.end - keys.begin;
    ahead.row_bytes = task.heads * shape_.head_dim * kSize;
    ahead.element_bytes = kSize;
    ahead.pace = 3 * table_.strip * kSize * kPerStep<Step> / 64;
    return ahead;
  }

  int64_t part_of(const AttentionTask& task, int64_t piece) const {
    return plan_.splits[task.split].first_part + piece - visibility_.first_seen(task.position) / kPiece;
  }

  void write(const AttentionTask& task, Mixed state) const {
    const auto finish = finish_of(table_, Q{});
    const int64_t per_head = task.tokens * shape_.group;
    for (int64_t head = 0; head < task.heads; ++head) {
      for (int64_t i = 0; i < per_head; ++i) {
        const int64_t query = head * per_head + i;
        finish(state.mixed + query * shape_.width, state.sum[query], out_ + place_of(task, head, i),
               shape_.head_dim);
      }
    }
  }

  const int64_t threads_;
  const AttentionTable& table_;
  const PieceTable<T, Step>& pieces_;
  const Shape shape_;
  const Scoring scoring_;
  const Visibility visibility_;
  const Q* q_;
  const T* k_;
  const T* v_;
  Q* out_;
  const AttentionPlan plan_;
  const int64_t part_queries_;
  std::vector<std::atomic<int64_t>> left_;  // tasks of each split
  std::unique_ptr<float[]> parts_;
};

}  // namespace hexserve
