// linear(x [T, in], layer, live, residual [T, features] or [0],
//        weight [layers, panels, ...], bias [layers, features] or [0], ...) -> y [T, features], ...
// gated_linear(x, layer, live, gate, bias, up, bias) -> y
//
// A task is a block of rows by a group of panels, and all of the inputs. Tasks of one group
// follow one another: it is read from memory once, however many blocks there are.

#include <string>
#include <utility>
#include <vector>

#include "kernel_table.h"
#include "operands.h"
#include "parallel.h"

namespace hexserve {
namespace {

// A weight of one layer, and its bias if it has one.
template <typename T>
struct Weight {
  const T* data;
  const T* bias;
  int64_t in, features;

  int64_t panels() const { return (features + kPanel - 1) / kPanel; }
  Panel<T> panel(int64_t p) const {
    const int64_t first = p * kPanel;
    return {data + first * in, bias == nullptr ? nullptr : bias + first, std::min(kPanel, features - first)};
  }
};

// How the rows and the panels of a call are split into tasks.
class Split {
 public:
  Split(const ffi::ThreadPool& pool, int64_t rows, int64_t panels, int64_t steps, int64_t most_panels)
      : rows_(rows), blocks_((rows + kMostRows - 1) / kMostRows) {
    // Below this, a thread takes longer to wake than to be done: products of one row, one panel
    // and one step, where fewer rows than eight cost like eight, the time to read the weight.
    constexpr int64_t kWorthWaking = 32768;
    const bool small = std::max<int64_t>(rows, 8) * panels * steps < kWorthWaking;
    threads_ = small ? 1 : threads_of(pool);
    // A wide group copies its rows of x less often; a narrow one leaves no thread without work.
    group_ = std::clamp<int64_t>(panels * blocks_ / (threads_ * 4), 1, most_panels);
  }

  int64_t threads() const { return threads_; }
  int64_t blocks() const { return blocks_; }
  int64_t group() const { return group_; }
  int64_t groups(int64_t panels) const { return (panels + group_ - 1) / group_; }
  int64_t first_row(int64_t block) const { return rows_ * block / blocks_; }

 private:
  int64_t rows_, blocks_, threads_, group_;
};

// One of the products of a call.
template <typename T, typename Out>
struct Product {
  Weight<T> weight;
  Out* y;
};

template <typename T, typename Out>
ffi::Future multiply(ffi::ThreadPool& pool, MultiplyPanels<T> multiply_panels, StoreSums<T, Out> store, const T* x,
                     int64_t live, std::vector<Product<T, Out>> products, const T* residual) {
  const int64_t in = products[0].weight.in, steps = in / kInputsPerStep<T>;
  int64_t panels = 0, groups = 0;
  for (const auto& product : products) panels += product.weight.panels();
  const Split split(pool, live, panels, steps, kMostPanels);
  for (const auto& product : products) groups += split.groups(product.weight.panels());
  return parallel_for(
      pool, split.threads(), groups * split.blocks(), [=, products = std::move(products)](int64_t task) {
        const int64_t block = task % split.blocks();
        int64_t group = task / split.blocks();
        const Product<T, Out>* product = products.data();
        for (; group >= split.groups(product->weight.panels()); ++product) {
          group -= split.groups(product->weight.panels());
        }
        const Weight<T>& weight = product->weight;
        const int64_t first = group * split.group();
        const int64_t count = std::min(split.group(), weight.panels() - first);
        Panel<T> panels[kMostPanels];
        for (int64_t p = 0; p < count; ++p) panels[p] = weight.panel(first + p);

        const int64_t row = split.first_row(block), rows = split.first_row(block + 1) - row;
        alignas(64) PanelSums sums[kMostPanels];
        multiply_panels(x + row * in, rows, steps, panels, count, sums);
        for (int64_t p = 0; p < count; ++p) {
          const int64_t corner = row * weight.features + (first + p) * kPanel;
          store(sums[p], rows, panels[p].features, residual == nullptr ? nullptr : residual + corner,
                product->y + corner, weight.features);
        }
      });
}

template <typename T>
ffi::Future multiply_gated(ffi::ThreadPool& pool, MultiplyPanels<T> multiply_panels, StoreGated<T> store, const T* x,
                           int64_t live, const Weight<T>& gate, const Weight<T>& up, T* y) {
  const int64_t in = gate.in, steps = in / kInputsPerStep<T>, features = gate.features;
  const Split split(pool, live, 2 * gate.panels(), steps, kMostPanels / 2);
  return parallel_for(pool, split.threads(), split.groups(gate.panels()) * split.blocks(), [=](int64_t task) {
    const int64_t block = task % split.blocks();
    const int64_t first = task / split.blocks() * split.group();
    const int64_t count = std::min(split.group(), gate.panels() - first);
    Panel<T> panels[kMostPanels];
    for (int64_t p = 0; p < count; ++p) {
      panels[p] = gate.panel(first + p);
      panels[count + p] = up.panel(first + p);
    }
    const int64_t row = split.first_row(block), rows = split.first_row(block + 1) - row;
    alignas(64) PanelSums sums[kMostPanels];
    multiply_panels(x + row * in, rows, steps, panels, 2 * count, sums);
    for (int64_t p = 0; p < count; ++p) {
      store(sums[p], sums[count + p], rows, panels[p].features, y + row * features + (first + p) * kPanel, features);
    }
  });
}

// The operands that both handlers have. `problem` of a wrong call names what is wrong, or is empty.
struct Call {
  const Operand& x;
  const Operand& layer;
  const Operand& live;

  int64_t rows() const { return x.dimensions()[0]; }
  int64_t in() const { return x.dimensions()[1]; }

  std::string problem() const {
    const bool known = x.element_type() == ffi::F32 || x.element_type() == ffi::BF16;
    if (x.dimensions().size() != 2 || !known) return "x must be float32 or bfloat16 [T, in]";
    if (x.element_type() == ffi::BF16 && in() % 2 != 0) return "x must have an even width in bfloat16";
    if (!is_scalar(layer) || !is_scalar(live)) return "layer and live must be int32 scalars";
    if (scalar(live) < 0 || scalar(live) > rows()) return "live is out of range";
    return "";
  }

  bool is_absent(const Operand& optional) const { return optional.element_count() == 0; }

  // Of a result [T, features] of this call, in the dtype of x or in `other`.
  std::string problem_of_result(const Operand& y, ffi::DataType other) const {
    const bool fits = y.element_type() == x.element_type() || y.element_type() == other;
    if (y.dimensions().size() != 2 || y.dimensions()[0] != rows() || !fits) return "y must be [T, features] like x";
    return "";
  }

  std::string problem_of_weight(const std::string& name, const Operand& weight, const Operand& bias,
                                int64_t features) const {
    const bool pairs = x.element_type() == ffi::BF16;
    const auto shape = weight.dimensions();
    if (weight.element_type() != x.element_type() || shape.size() != (pairs ? 5 : 4) ||
        shape[1] != (features + kPanel - 1) / kPanel || shape[2] != (pairs ? in() / 2 : in()) || shape[3] != kPanel ||
        (pairs && shape[4] != 2)) {
      return name + " is not packed for x and y: [layers, panels, in, 32], or [.., in / 2, 32, 2] in bfloat16";
    }
    if (scalar(layer) < 0 || scalar(layer) >= shape[0]) return "layer is out of range of " + name;
    if (!is_absent(bias) && (bias.element_type() != x.element_type() || bias.dimensions().size() != 2 ||
                             bias.dimensions()[0] != shape[0] || bias.dimensions()[1] != features)) {
      return "the bias of " + name + " must be [layers, features] like x";
    }
    return "";
  }

  template <typename T>
  Weight<T> weight(const Operand& weight, const Operand& bias, int64_t features) const {
    const int64_t panels = weight.dimensions()[1], index = scalar(layer);
    return {data<const T>(weight) + index * panels * kPanel * in(),
            is_absent(bias) ? nullptr : data<const T>(bias) + index * features, in(), features};
  }
};

template <typename T, typename Out>
ffi::Future run_linear(ffi::ThreadPool& pool, MultiplyPanels<T> multiply_panels, StoreSums<T, Out> store,
                       const Call& call, const std::vector<Operand>& weights, const std::vector<Operand>& ys,
                       const Operand& residual) {
  std::vector<Product<T, Out>> products;
  for (size_t i = 0; i < ys.size(); ++i) {
    products.push_back({call.weight<T>(weights[2 * i], weights[2 * i + 1], ys[i].dimensions()[1]), data<Out>(ys[i])});
  }
  return multiply<T, Out>(pool, multiply_panels, store, data<const T>(call.x), scalar(call.live), std::move(products),
                          call.is_absent(residual) ? nullptr : data<const T>(residual));
}

ffi::Future linear(ffi::ThreadPool pool, Operand x, Operand layer, Operand live, Operand residual,
                   ffi::RemainingArgs weights_and_biases, ffi::RemainingRets results) {
  const Call call{x, layer, live};
  if (const std::string problem = call.problem(); !problem.empty()) return failed("linear: " + problem);
  if (results.empty() || weights_and_biases.size() != 2 * results.size()) {
    return failed("linear: every result must have a weight and a bias");
  }
  std::vector<Operand> weights, ys;
  for (size_t i = 0; i < weights_and_biases.size(); ++i) weights.push_back(*weights_and_biases.get<Operand>(i));
  for (size_t i = 0; i < results.size(); ++i) {
    ys.push_back(**results.get<Operand>(i));
    std::string problem = call.problem_of_result(ys[i], ffi::F32);
    if (problem.empty() && ys[i].element_type() != ys[0].element_type()) problem = "results must have one dtype";
    if (problem.empty()) {
      problem = call.problem_of_weight("weight " + std::to_string(i), weights[2 * i], weights[2 * i + 1],
                                       ys[i].dimensions()[1]);
    }
    if (!problem.empty()) return failed("linear: " + problem);
  }
  if (!call.is_absent(residual) &&
      (ys.size() != 1 || residual.element_type() != x.element_type() || residual.dimensions().size() != 2 ||
       residual.dimensions()[0] != call.rows() || residual.dimensions()[1] != ys[0].dimensions()[1])) {
    return failed("linear: residual must be like the one result, in the dtype of x");
  }
  const LinearTable& table = kernels().linear;
  if (x.element_type() == ffi::F32) {
    return run_linear<float, float>(pool, table.multiply_f32, table.store_f32, call, weights, ys, residual);
  }
  if (ys[0].element_type() == ffi::F32) {
    return run_linear<uint16_t, float>(pool, table.multiply_bf16, table.store_bf16_as_f32, call, weights, ys,
                                       residual);
  }
  return run_linear<uint16_t, uint16_t>(pool, table.multiply_bf16, table.store_bf16, call, weights, ys, residual);
}

template <typename T>
ffi::Future run_gated(ffi::ThreadPool& pool, MultiplyPanels<T> multiply_panels, StoreGated<T> store, const Call& call,
                      const Operand& gate, const Operand& gate_bias, const Operand& up, const Operand& up_bias,
                      const Operand& y) {
  const int64_t features = y.dimensions()[1];
  return multiply_gated<T>(pool, multiply_panels, store, data<const T>(call.x), scalar(call.live),
                           call.weight<T>(gate, gate_bias, features), call.weight<T>(up, up_bias, features),
                           data<T>(y));
}

ffi::Future gated_linear(ffi::ThreadPool pool, Operand x, Operand layer, Operand live, Operand gate,
                         Operand gate_bias, Operand up, Operand up_bias, Result y) {
  const Call call{x, layer, live};
  std::string problem = call.problem();
  if (problem.empty()) problem = call.problem_of_result(*y, x.element_type());
  if (problem.empty()) problem = call.problem_of_weight("gate", gate, gate_bias, y->dimensions()[1]);
  if (problem.empty()) problem = call.problem_of_weight("up", up, up_bias, y->dimensions()[1]);
  if (!problem.empty()) return failed("gated_linear: " + problem);
  const LinearTable& table = kernels().linear;
  if (x.element_type() == ffi::F32) {
    return run_gated<float>(pool, table.multiply_f32, table.store_gated_f32, call, gate, gate_bias, up, up_bias, *y);
  }
  return run_gated<uint16_t>(pool, table.multiply_bf16, table.store_gated_bf16, call, gate, gate_bias, up, up_bias,
                             *y);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(hexserve_linear, linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(hexserve_gated_linear, gated_linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

}  // namespace hexserve
