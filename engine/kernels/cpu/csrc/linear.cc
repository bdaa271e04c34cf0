// linear(x [T, in], layer, live, residual [T, features] or [0],
//        weight [layers, panels, ...], bias [layers, features] or [0], ...) -> y [T, features], ...
// gated_linear(x, layer, live, gate, bias, up, bias) -> y
//
// A task is a block of rows by a group of panels, with all of the inputs. The tasks of a group
// follow one another, so that it is read from memory once, however many blocks there are.

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernel_table.h"
#include "linear_operands.h"
#include "parallel.h"

namespace hexserve {
namespace {

// Below this many products of a row, a panel and a step, another thread takes longer to wake
// than the work does. Up to eight rows cost alike: the time to read the weight.
constexpr int64_t kWorthWaking = 32768;
constexpr int64_t kRowsPerRead = 8;

// How the rows and the columns of a call are split into tasks; a column is a panel, or the two
// of a gated linear.
class Split {
 public:
  Split(const ffi::ThreadPool& pool, int64_t rows, int64_t columns, int64_t panels_per_column, int64_t steps)
      : rows_(rows), blocks_((rows + kMostRows - 1) / kMostRows) {
    const int64_t products = std::max(rows, kRowsPerRead) * columns * panels_per_column * steps;
    threads_ = products < kWorthWaking ? 1 : threads_of(pool);
    // A wide group copies its rows of x less often; a narrow one lets threads end together. Of few
    // rows there is little to copy.
    const int64_t tasks_per_thread = rows <= kRowsPerRead ? 8 : 4;
    group_ = std::clamp<int64_t>(columns * blocks_ / (threads_ * tasks_per_thread), 1,
                                 kMostPanels / panels_per_column);
  }

  int64_t threads() const { return threads_; }
  int64_t blocks() const { return blocks_; }
  int64_t first_row(int64_t block) const { return rows_ * block / blocks_; }
  int64_t group() const { return group_; }
  int64_t groups(int64_t columns) const { return (columns + group_ - 1) / group_; }

 private:
  int64_t rows_, blocks_, threads_, group_;
};

template <typename T, typename Out>
struct Product {
  Weight<T> weight;
  Out* y;
};

template <typename T, typename Out>
ffi::Future multiply(ffi::ThreadPool& pool, MultiplyPanels<T> multiply_panels, StoreSums<T, Out> store,
                     const LinearCall& call, const std::vector<Operand>& weights,
                     const std::vector<Operand>& ys, const Operand& residual) {
  std::vector<Product<T, Out>> products;
  int64_t all_panels = 0;
  for (size_t i = 0; i < ys.size(); ++i) {
    const int64_t features = ys[i].dimensions()[1];
    products.push_back({call.weight<T>(weights[2 * i], weights[2 * i + 1], features), data<Out>(ys[i])});
    all_panels += products[i].weight.panels();
  }
  const int64_t in = call.in(), steps = in / kInputsPerStep<T>;
  const Split split(pool, scalar(call.live), all_panels, 1, steps);
  int64_t groups = 0;
  for (const auto& product : products) groups += split.groups(product.weight.panels());

  const T* x = data<const T>(call.x);
  const T* added = is_absent(residual) ? nullptr : data<const T>(residual);
  auto task = [=, products = std::move(products)](int64_t index) {
    int64_t group = index / split.blocks();
    const Product<T, Out>* product = products.data();
    for (; group >= split.groups(product->weight.panels()); ++product) {
      group -= split.groups(product->weight.panels());
    }
    const Weight<T>& weight = product->weight;
    const int64_t first = group * split.group(), count = std::min(split.group(), weight.panels() - first);
    Panel<T> panels[kMostPanels];
    for (int64_t p = 0; p < count; ++p) panels[p] = weight.panel(first + p);

    const int64_t block = index % split.blocks(), row = split.first_row(block);
    const int64_t rows = split.first_row(block + 1) - row;
    alignas(64) PanelSums sums[kMostPanels];
    multiply_panels(x + row * in, rows, steps, panels, count, sums);
    for (int64_t p = 0; p < count; ++p) {
      const int64_t corner = row * weight.features + (first + p) * kPanel;
      store(sums[p], rows, panels[p].features, added == nullptr ? nullptr : added + corner,
            product->y + corner, weight.features);
    }
  };
  return parallel_for(pool, split.threads(), groups * split.blocks(), std::move(task),
                      split.threads());
}

template <typename T>
ffi::Future multiply_gated(ffi::ThreadPool& pool, MultiplyPanels<T> multiply_panels, StoreGated<T> store,
                           const LinearCall& call, const Weight<T>& gate, const Weight<T>& up, T* y) {
  const int64_t in = gate.in, steps = in / kInputsPerStep<T>, features = gate.features;
  const Split split(pool, scalar(call.live), gate.panels(), 2, steps);
  const T* x = data<const T>(call.x);
  auto task = [=](int64_t index) {
    const int64_t first = index / split.blocks() * split.group();
    const int64_t count = std::min(split.group(), gate.panels() - first);
    Panel<T> panels[kMostPanels];
    for (int64_t p = 0; p < count; ++p) {
      panels[p] = gate.panel(first + p);
      panels[count + p] = up.panel(first + p);
    }
    const int64_t block = index % split.blocks(), row = split.first_row(block);
    const int64_t rows = split.first_row(block + 1) - row;
    alignas(64) PanelSums sums[kMostPanels];
    multiply_panels(x + row * in, rows, steps, panels, 2 * count, sums);
    for (int64_t p = 0; p < count; ++p) {
      store(sums[p], sums[count + p], rows, panels[p].features, y + row * features + (first + p) * kPanel,
            features);
    }
  };
  return parallel_for(pool, split.threads(), split.groups(gate.panels()) * split.blocks(), task,
                      split.threads());
}

ffi::Future linear(ffi::ThreadPool pool, Operand x, Operand layer, Operand live, Operand residual,
                   ffi::RemainingArgs weights_and_biases, ffi::RemainingRets results) {
  const LinearCall call{x, layer, live};
  std::string problem = call.problem();
  if (!problem.empty()) return failed("linear: " + problem);
  if (results.empty() || weights_and_biases.size() != 2 * results.size()) {
    return failed("linear: every result must have a weight and a bias");
  }
  std::vector<Operand> weights, ys;
  for (size_t i = 0; i < weights_and_biases.size(); ++i) {
    weights.push_back(*weights_and_biases.get<Operand>(i));
  }
  for (size_t i = 0; i < results.size(); ++i) ys.push_back(**results.get<Operand>(i));

  const ffi::DataType out = ys[0].element_type();
  if (out != x.element_type() && out != ffi::F32) return failed("linear: y must be float32 or like x");
  for (size_t i = 0; i < ys.size(); ++i) {
    if (!call.is_output(ys[i], out)) return failed("linear: results must be [T, features], in one dtype");
    problem = call.problem_of("weight " + std::to_string(i), weights[2 * i], weights[2 * i + 1],
                              ys[i].dimensions()[1]);
    if (!problem.empty()) return failed("linear: " + problem);
  }
  if (!is_absent(residual) &&
      (ys.size() != 1 || !call.is_output(residual, x.element_type(), ys[0].dimensions()[1]))) {
    return failed("linear: residual must be like the one result, in the dtype of x");
  }

  const LinearTable& table = kernels().linear;
  if (!call.has_pairs()) {
    return multiply<float>(pool, table.multiply_f32, table.store_f32, call, weights, ys, residual);
  }
  if (out == ffi::F32) {
    return multiply<uint16_t>(pool, table.multiply_bf16, table.store_bf16_as_f32, call, weights, ys,
                              residual);
  }
  return multiply<uint16_t>(pool, table.multiply_bf16, table.store_bf16, call, weights, ys, residual);
}

ffi::Future gated_linear(ffi::ThreadPool pool, Operand x, Operand layer, Operand live, Operand gate,
                         Operand gate_bias, Operand up, Operand up_bias, Result y) {
  const LinearCall call{x, layer, live};
  std::string problem = call.problem();
  if (!problem.empty()) return failed("gated_linear: " + problem);
  if (!call.is_output(*y, x.element_type())) return failed("gated_linear: y must be [T, features] like x");
  const int64_t features = y->dimensions()[1];
  problem = call.problem_of("gate", gate, gate_bias, features);
  if (problem.empty()) problem = call.problem_of("up", up, up_bias, features);
  if (!problem.empty()) return failed("gated_linear: " + problem);

  const LinearTable& table = kernels().linear;
  const auto run = [&](auto multiply_panels, auto store, auto* out) {
    using T = std::remove_pointer_t<decltype(out)>;
    return multiply_gated<T>(pool, multiply_panels, store, call, call.weight<T>(gate, gate_bias, features),
                             call.weight<T>(up, up_bias, features), out);
  };
  return call.has_pairs() ? run(table.multiply_bf16, table.store_gated_bf16, data<uint16_t>(*y))
                          : run(table.multiply_f32, table.store_gated_f32, data<float>(*y));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(hexserve_linear, Guarded<linear>::call,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(hexserve_gated_linear, Guarded<gated_linear>::call,
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
