// How the attention of a ragged batch is cut into tasks.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention_table.h"

namespace hexserve {

// A query at position p sees the positions first_seen(p) ... p.
struct Visibility {
  int64_t window, chunk;  // 0 is no limit

  int64_t first_seen(int64_t position) const {
    const int64_t by_window = window > 0 ? position - window + 1 : 0;
    const int64_t by_chunk = chunk > 0 ? position / chunk * chunk : 0;
    return std::max<int64_t>({0, by_window, by_chunk});
  }

  // What a query sees of a piece.
  Keys seen(int64_t position, int64_t piece) const {
    const int64_t start = piece * kPiece;
    return {std::clamp<int64_t>(first_seen(position) - start, 0, kPiece),
            std::clamp<int64_t>(position + 1 - start, 0, kPiece)};
  }
};

// Query tokens of one row, some kv heads of them, and some pieces of what they see.
struct AttentionTask {
  int64_t row;
  int64_t token, tokens;  // flat
  int64_t position;       // of the first
  int64_t head, heads;    // kv heads
  int64_t piece, pieces;
  int64_t split;  // whose part this is; -1 if the task sees all the pieces
};

// Tokens whose pieces are spread over tasks. Part `piece` of a split holds what each of its
// queries got from that piece; whoever ends last merges them.
struct AttentionSplit {
  int64_t first_part, pieces, tasks;
};

struct AttentionPlan {
  std::vector<AttentionTask> tasks;
  std::vector<AttentionSplit> splits;
  int64_t parts = 0;
};

struct AttentionRow {
  int64_t row, token, tokens, position;
};

// Rows of so few tokens read much KV for little work: their tasks take all heads, in the order
// of memory, unless there are so few pieces that threads would wait for one another. Other rows are
// cut by head and by tiles of about kTileQueries queries, which share the packed KV of one head.
constexpr int64_t kNarrowTokens = 4;
constexpr int64_t kTileQueries = 192;
constexpr int64_t kTasksPerThread = 4;

inline AttentionPlan plan_attention(const std::vector<AttentionRow>& rows, const Visibility& visibility,
                                    int64_t kv_heads, int64_t group, int64_t threads) {
  AttentionPlan plan;
  const auto task_of = [&](const AttentionRow& row, int64_t done, int64_t tokens) {
    AttentionTask task = {row.row, row.token + done, tokens, row.position + done, 0, kv_heads, 0, 0, -1};
    task.piece = visibility.first_seen(task.position) / kPiece;
    task.pieces = (task.position + tokens - 1) / kPiece + 1 - task.piece;
    return task;
  };

  int64_t narrow_pieces = 0;
  for (const AttentionRow& row : rows) {
    if (row.tokens <= kNarrowTokens) narrow_pieces += task_of(row, 0, row.tokens).pieces;
  }
  // One thread merges as it goes.
  const int64_t most_pieces =
      threads == 1 ? narrow_pieces : std::max<int64_t>(1, narrow_pieces / (threads * kTasksPerThread));
  const bool by_head = threads > 1 && narrow_pieces < threads * kTasksPerThread;
  const int64_t tile = std::max<int64_t>(1, kTileQueries / group);
  for (const AttentionRow& row : rows) {
    if (row.tokens > kNarrowTokens) {
      for (int64_t done = 0; done < row.tokens; done += tile) {
        AttentionTask task = task_of(row, done, std::min(tile, row.tokens - done));
        task.heads = 1;
        for (task.head = 0; task.head < kv_heads; ++task.head) plan.tasks.push_back(task);
      }
      continue;
    }
    AttentionTask task = task_of(row, 0, row.tokens);
    const int64_t pieces = task.pieces, tasks = (pieces + most_pieces - 1) / most_pieces;
    const int64_t first = task.piece;
    task.heads = by_head ? 1 : kv_heads;
    for (; task.head < kv_heads; task.head += task.heads) {
      if (tasks > 1) {
        task.split = int64_t(plan.splits.size());
        plan.splits.push_back({plan.parts, pieces, tasks});
        plan.parts += pieces;
      }
      for (int64_t i = 0; i < tasks; ++i) {
        task.piece = first + pieces * i / tasks;
        task.pieces = first + pieces * (i + 1) / tasks - task.piece;
        plan.tasks.push_back(task);
      }
    }
  }
  // The longest first, so that threads end together.
  const auto cost = [](const AttentionTask& task) { return task.tokens * task.heads * task.pieces; };
  std::stable_sort(plan.tasks.begin(), plan.tasks.end(),
                   [&](const AttentionTask& a, const AttentionTask& b) { return cost(a) > cost(b); });
  return plan;
}

}  // namespace hexserve
