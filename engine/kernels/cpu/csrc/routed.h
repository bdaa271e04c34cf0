// Which rows each expert computes: the operands that say it, and the rows in the order of experts.

#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "linear_table.h"
#include "operands.h"

namespace hexserve {

// Routed rows side by side by expert, those of one expert in the order of their tokens.
struct Routed {
  // Rows of one expert that are computed together: at most kMostRows.
  struct Block {
    int64_t expert, first, rows;
  };

  std::vector<int32_t> token;  // of each row
  std::vector<float> weight;   // likewise; empty is ones
  std::vector<Block> blocks;

  const float* weights_of(const Block& block) const {
    return weight.empty() ? nullptr : weight.data() + block.first;
  }
};

// experts int32 [T, top_k], and their weights float32 [T, top_k] or [0].
struct RoutingOperands {
  const Operand& experts;
  const Operand& weights;

  int64_t tokens() const { return experts.dimensions()[0]; }
  int64_t top_k() const { return experts.dimensions()[1]; }

  // What is wrong with them, the first `live` tokens being routed among `count` experts; or empty.
  std::string problem(int64_t live, int64_t count) const {
    if (!is_int32(experts, 2)) return "the routing must be int32 [T, top_k]";
    const auto shape = experts.dimensions(), own = weights.dimensions();
    if (!is_absent(weights) && (weights.element_type() != ffi::F32 ||
                                !std::equal(own.begin(), own.end(), shape.begin(), shape.end()))) {
      return "the weights of the routing must be float32 [T, top_k]";
    }
    if (live < 0 || live > tokens()) return "live is out of range";
    const int32_t* expert = data<const int32_t>(experts);
    if (std::any_of(expert, expert + live * top_k(), [=](int32_t e) { return e < 0 || e >= count; })) {
      return "the routing leads out of the experts";
    }
    return "";
  }

  // Of operands that have no problem.
  Routed sorted(int64_t live, int64_t count) const {
    const int64_t rows = live * top_k();
    const int32_t* expert = data<const int32_t>(experts);
    std::vector<int64_t> next(count + 1, 0);  // the place of each expert's next row
    for (int64_t row = 0; row < rows; ++row) ++next[expert[row] + 1];
    Routed result;
    for (int64_t e = 0; e < count; ++e) {
      const int64_t own = next[e + 1], blocks = (own + kMostRows - 1) / kMostRows;
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t first = own * b / blocks;
        result.blocks.push_back({e, next[e] + first, own * (b + 1) / blocks - first});
      }
      next[e + 1] += next[e];
    }
    const float* weight = is_absent(weights) ? nullptr : data<const float>(weights);
    result.token.resize(rows);
    if (weight != nullptr) result.weight.resize(rows);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t place = next[expert[row]]++;
      result.token[place] = int32_t(row / top_k());
      if (weight != nullptr) result.weight[place] = weight[row];
    }
    return result;
  }
};

}  // namespace hexserve
