// The operands of a matmul's call: checked, then as typed pointers.

#pragma once

#include <algorithm>
#include <string>

#include "linear_table.h"
#include "operands.h"

namespace hexserve {

// The weight of one layer, or of one expert of it, stored as W, and its bias if it has one.
template <typename T, typename W>
struct Weight {
  const W* data;
  const float* scales;
  const T* bias;
  int64_t in, features;

  int64_t panels() const { return (features + kPanel - 1) / kPanel; }
  // One of a group of `count`.
  Panel<T, W> panel(int64_t index, int64_t count) const {
    const int64_t first = index * kPanel;
    return {data + first * in, data + (first + count * kPanel) * in,
            scales == nullptr ? nullptr : scales + first, bias == nullptr ? nullptr : bias + first,
            std::min(kPanel, features - first)};
  }
};

// The weight of all layers; only one of int8 has scales.
struct WeightOperands {
  Operand matrix, scales, bias;

  bool is_quantized() const { return matrix.element_type() == ffi::S8; }
};

// What all have. A `problem` says what is wrong with an operand, and is empty if nothing is.
struct LinearCall {
  const Operand& x;
  const Operand& layer;
  const Operand& live;
  // Dimensions before a matrix: those of [layers] or [layers, experts].
  size_t stacked = 1;

  int64_t rows() const { return x.dimensions()[0]; }
  int64_t in() const { return x.dimensions()[1]; }
  bool has_pairs() const { return x.element_type() == ffi::BF16; }

  std::string problem() const {
    if (x.dimensions().size() != 2 || (x.element_type() != ffi::F32 && !has_pairs())) {
      return "x must be float32 or bfloat16 [T, in]";
    }
    if (has_pairs() && in() % 2 != 0) return "x must have an even width in bfloat16";
    if (!is_scalar(layer) || !is_scalar(live)) return "layer and live must be int32 scalars";
    if (scalar(live) < 0 || scalar(live) > rows()) return "live is out of range";
    return "";
  }

  // [T, features]; features is any number, or that of another operand.
  bool is_output(const Operand& y, ffi::DataType dtype, int64_t features = -1) const {
    return y.element_type() == dtype && y.dimensions().size() == 2 && y.dimensions()[0] == rows() &&
           (features < 0 || y.dimensions()[1] == features);
  }

  std::string problem_of(const std::string& name, const WeightOperands& weight, int64_t features) const {
    const auto shape = weight.matrix.dimensions();
    const bool quantized = weight.is_quantized(), pairs = has_pairs() && !quantized;
    if ((!quantized && weight.matrix.element_type() != x.element_type()) ||
        shape.size() != stacked + (pairs ? 4 : 3) || shape[stacked] != (features + kPanel - 1) / kPanel ||
        shape[stacked + 1] != (pairs ? in() / 2 : in()) || shape[stacked + 2] != kPanel ||
        (pairs && shape[stacked + 3] != 2)) {
      return name + " is not packed for x and y: [" + (stacked == 1 ? "layers" : "layers, experts") +
             ", panels, in, 32], or [.., in / 2, 32, 2] in bfloat16";
    }
    if (scalar(layer) < 0 || scalar(layer) >= shape[0]) return "layer is out of range of " + name;
    const auto is_row = [&](const Operand& row, ffi::DataType dtype) {
      const auto own = row.dimensions();
      return row.element_type() == dtype && own.size() == stacked + 1 && own[stacked] == features &&
             std::equal(own.begin(), own.begin() + stacked, shape.begin());
    };
    if (quantized ? !is_row(weight.scales, ffi::F32) : !is_absent(weight.scales)) {
      return "the scales of " + name + " must be float32 " + row_shape() + ", where it is int8 alone";
    }
    if (!is_absent(weight.bias) && !is_row(weight.bias, x.element_type())) {
      return "the bias of " + name + " must be " + row_shape() + " in the dtype of x";
    }
    return "";
  }

  // Of operands that have no problem; where experts are stacked, the first one's.
  template <typename T, typename W>
  Weight<T, W> weight(const WeightOperands& weight, int64_t features) const {
    const int64_t index = scalar(layer) * (stacked == 1 ? 1 : weight.matrix.dimensions()[1]);
    return {data<const W>(weight.matrix) + index * weight.matrix.dimensions()[stacked] * kPanel * in(),
            is_absent(weight.scales) ? nullptr : data<const float>(weight.scales) + index * features,
            is_absent(weight.bias) ? nullptr : data<const T>(weight.bias) + index * features, in(), features};
  }

 private:
  std::string row_shape() const {
    return stacked == 1 ? "[layers, features]" : "[layers, experts, features]";
  }
};

}  // namespace hexserve
