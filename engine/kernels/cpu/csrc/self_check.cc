#include "self_check.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <type_traits>
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

// How each kind of panel is laid out (linear_table.h), and what no loop may take in.
struct Pairs {
  using Stored = uint16_t;
  static constexpr Stored kPoison = kNan;
  static Stored stored(int small) { return bfloat16(small); }
  static int64_t input(int64_t i) { return i / (2 * kPanel) * 2 + i % 2; }
  static int64_t output(int64_t i) { return i / 2 % kPanel; }
};

struct Quantized {
  using Stored = int8_t;
  static constexpr Stored kPoison = 127;
  static Stored stored(int small) { return int8_t(small); }
  static int64_t input(int64_t i) { return i / kPanel; }
  static int64_t output(int64_t i) { return i % kPanel; }
};

template <typename Layout>
bool is_right(MultiplyPanels<uint16_t, typename Layout::Stored> multiply, ScaleSums<uint16_t> scale) {
  using W = typename Layout::Stored;
  // Poison follows each operand.
  constexpr int64_t kGap = 1024, kPanelSize = kIn * kPanel;
  const Matrix x = inputs(), weight = weights();
  std::vector<uint16_t> rows(kRows * kIn + kGap, kNan), biases(kPanels * kPanel, kNan);
  std::vector<W> matrix(kPanels * (kPanelSize + kGap), Layout::kPoison);
  const std::vector<float> ones(kFeatures, 1.0f);
  for (int64_t i = 0; i < kRows * kIn; ++i) rows[i] = bfloat16(x[i / kIn][i % kIn]);
  for (int64_t o = 0; o < kFeatures; ++o) biases[o] = bfloat16(bias(o));
  Panel<uint16_t, W> panels[kPanels];
  for (int64_t p = 0; p < kPanels; ++p) {
    const int64_t first = p * kPanel;
    W* panel = matrix.data() + p * (kPanelSize + kGap);
    for (int64_t i = 0; i < kPanelSize; ++i) {
      panel[i] = Layout::stored(weight[first + Layout::output(i)][Layout::input(i)]);
    }
    panels[p] = {panel, panel, ones.data() + first, biases.data() + first, std::min(kPanel, kFeatures - first)};
  }
  const std::unique_ptr<PanelSums[]> sums(new PanelSums[kPanels]);
  multiply(rows.data(), kRows, kSteps, panels, kPanels, sums.get());
  if constexpr (std::is_same_v<Layout, Quantized>) {
    for (int64_t p = 0; p < kPanels; ++p) scale(panels[p], kRows, sums[p]);
  }
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t o = 0; o < kPanels * kPanel; ++o) {
      const int expected = std::inner_product(x[row].begin(), x[row].end(), weight[o].begin(), bias(o));
      if (sums[o / kPanel][row][o % kPanel] != float(expected)) return false;
    }
  }
  return true;
}

}  // namespace

bool multiplies_right(const KernelTable& table) {
  return is_right<Pairs>(table.linear.multiply_bf16, nullptr) &&
         is_right<Quantized>(table.linear.multiply_bf16_int8, table.linear.scale_bf16);
}

}  // namespace hexserve
