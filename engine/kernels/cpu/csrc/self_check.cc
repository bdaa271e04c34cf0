#include "self_check.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

namespace hexserve {
namespace {

// More than a block of rows and than a depth of steps, with a tail of each; two panels, one of
// them not full.
constexpr int64_t kRows = 41, kSteps = 277, kIn = 2 * kSteps, kPanels = 2, kFeatures = 51;
constexpr uint16_t kNan = 0x7fc0;

// Small whole numbers: bfloat16 and the sums in float32 hold them without rounding, so every order
// of the terms gives the same.
using Matrix = std::vector<std::vector<int>>;

Matrix inputs() {
  Matrix all(kRows, std::vector<int>(kIn));
  for (int64_t i = 0; i < kRows; ++i) {
    for (int64_t k = 0; k < kIn; ++k) all[i][k] = int((7 * i + 3 * k + k / 11) % 15) - 7;
  }
  return all;
}

// Of each output; 0 where a panel has none.
Matrix weights() {
  Matrix all(kPanels * kPanel, std::vector<int>(kIn));
  for (int64_t o = 0; o < kFeatures; ++o) {
    for (int64_t k = 0; k < kIn; ++k) all[o][k] = int((5 * o + 11 * k + k / 13) % 17) - 8;
  }
  return all;
}

int bias(int64_t output) { return output < kFeatures ? int(output % 7) - 3 : 0; }

uint16_t bfloat16(int small) {
  const float value = float(small);
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return uint16_t(bits >> 16);
}

}  // namespace

bool multiplies_right(const KernelTable& table) {
  // What no loop may take in follows each operand.
  constexpr int64_t kGap = 1024, kPanelSize = kIn * kPanel;
  const Matrix x = inputs(), weight = weights();
  std::vector<uint16_t> rows(kRows * kIn + kGap, kNan), matrix(kPanels * (kPanelSize + kGap), kNan);
  std::vector<uint16_t> biases(kPanels * kPanel, kNan);
  for (int64_t i = 0; i < kRows * kIn; ++i) rows[i] = bfloat16(x[i / kIn][i % kIn]);
  for (int64_t o = 0; o < kFeatures; ++o) biases[o] = bfloat16(bias(o));
  Panel<uint16_t> panels[kPanels];
  for (int64_t p = 0; p < kPanels; ++p) {
    const int64_t first = p * kPanel;
    uint16_t* panel = matrix.data() + p * (kPanelSize + kGap);
    for (int64_t i = 0; i < kPanelSize; ++i) {
      const int64_t step = i / (2 * kPanel), output = i / 2 % kPanel;
      panel[i] = bfloat16(weight[first + output][2 * step + i % 2]);
    }
    panels[p] = {panel, biases.data() + first, std::min(kPanel, kFeatures - first)};
  }
  const std::unique_ptr<PanelSums[]> sums(new PanelSums[kPanels]);
  table.linear.multiply_bf16(rows.data(), kRows, kSteps, panels, kPanels, sums.get());
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t o = 0; o < kPanels * kPanel; ++o) {
      const int expected = std::inner_product(x[row].begin(), x[row].end(), weight[o].begin(), bias(o));
      if (sums[o / kPanel][row][o % kPanel] != float(expected)) return false;
    }
  }
  return true;
}

}  // namespace hexserve
