// The operands of a call of linear or gated_linear: checked, then as typed pointers.

#pragma once

#include <algorithm>
#include <string>

#include "linear_table.h"
#include "operands.h"

namespace hexserve {

// An optional operand that is not there has no elements.
inline bool is_absent(const Operand& optional) { return optional.element_count() == 0; }

// The weight of one layer, and its bias if it has one.
template <typename T>
struct Weight {
  const T* data;
  const T* bias;
  int64_t in, features;

  int64_t panels() const { return (features + kPanel - 1) / kPanel; }
  Panel<T> panel(int64_t index) const {
    const int64_t first = index * kPanel;
    return {data + first * in, bias == nullptr ? nullptr : bias + first, std::min(kPanel, features - first)};
  }
};

// What both have. A `problem` says what is wrong with an operand, and is empty if nothing is.
struct LinearCall {
  const Operand& x;
  const Operand& layer;
  const Operand& live;

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

  std::string problem_of(const std::string& name, const Operand& weight, const Operand& bias,
                         int64_t features) const {
    const auto shape = weight.dimensions();
    if (weight.element_type() != x.element_type() || shape.size() != (has_pairs() ? 5 : 4) ||
        shape[1] != (features + kPanel - 1) / kPanel || shape[2] != (has_pairs() ? in() / 2 : in()) ||
        shape[3] != kPanel || (has_pairs() && shape[4] != 2)) {
      return name +
             " is not packed for x and y: [layers, panels, in, 32], or [.., in / 2, 32, 2] in bfloat16";
    }
    if (scalar(layer) < 0 || scalar(layer) >= shape[0]) return "layer is out of range of " + name;
    if (!is_absent(bias) && (bias.element_type() != x.element_type() || bias.dimensions().size() != 2 ||
                             bias.dimensions()[0] != shape[0] || bias.dimensions()[1] != features)) {
      return "the bias of " + name + " must be [layers, features] in the dtype of x";
    }
    return "";
  }

  // Of operands that have no problem.
  template <typename T>
  Weight<T> weight(const Operand& weight, const Operand& bias, int64_t features) const {
    const int64_t index = scalar(layer);
    return {data<const T>(weight) + index * weight.dimensions()[1] * kPanel * in(),
            is_absent(bias) ? nullptr : data<const T>(bias) + index * features, in(), features};
  }
};

}  // namespace hexserve
