// linear(x [T, in], layer, live, residual [T, features] or [0],
//        weight [layers, panels, ...], scales [layers, features] or [0],
//        bias [layers, features] or [0], ...; soft_cap, 0 is none) -> y [T, features], ...
// gated_linear(x, layer, live, gate, scales, bias, up, scales, bias; activation) -> y
//
// A task is a block of rows by a group of panels, with all of the inputs. The tasks of a group
// follow one another, so that it is read from memory once, however many blocks there are.

#include <string>
#include <utility>
#include <vector>

#include "kernel_table.h"
#include "linear_loops.h"
#include "linear_operands.h"
#include "parallel.h"

namespace hexserve {
namespace {

// How the rows and the columns of a call are split into tasks; a column is a panel, or the two
// of a gated linear.
class Split {
 public:
  // A step of a weight's output takes `step_bytes`.
  Split(const ffi::ThreadPool& pool, int64_t rows, int64_t columns, int64_t panels_per_column, int64_t steps,
        int64_t step_bytes)
      : rows_(rows), blocks_((rows + kMostRows - 1) / kMostRows) {
    threads_ = threads_for(pool, rows, columns * panels_per_column, steps, step_bytes);
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

template <typename T, typename W, typename Out>
struct Product {
  Weight<T, W> weight;
  Out* y;
};

template <typename T, typename W, typename Out>
ffi::Future multiply(ffi::ThreadPool& pool, Sums<T, W> sum, StoreSums<T, Out> store, const LinearCall& call,
                     const std::vector<WeightOperands>& weights, const std::vector<Operand>& ys,
                     const Operand& residual, float soft_cap) {
  std::vector<Product<T, W, Out>> products;
  int64_t all_panels = 0;
  for (size_t i = 0; i < ys.size(); ++i) {
    const int64_t features = ys[i].dimensions()[1];
    products.push_back({call.weight<T, W>(weights[i], features), data<Out>(ys[i])});
    all_panels += products[i].weight.panels();
  }
  const int64_t in = call.in(), steps = in / kInputsPerStep<T>;
  const Split split(pool, scalar(call.live), all_panels, 1, steps, kStepBytes<T, W>);
  int64_t groups = 0;
  for (const auto& product : products) groups += split.groups(product.weight.panels());

  const T* x = data<const T>(call.x);
  const CapSums cap = kernels().linear.cap;
  const T* added = is_absent(residual) ? nullptr : data<const T>(residual);
  auto task = [=, products = std::move(products)](int64_t index) {
    int64_t group = index / split.blocks();
    const Product<T, W, Out>* product = products.data();
    for (; group >= split.groups(product->weight.panels()); ++product) {
      group -= split.groups(product->weight.panels());
    }
    const Weight<T, W>& weight = product->weight;
    const int64_t first = group * split.group(), count = std::min(split.group(), weight.panels() - first);
    Panel<T, W> panels[kMostPanels];
    for (int64_t p = 0; p < count; ++p) panels[p] = weight.panel(first + p, count);

    const int64_t block = index % split.blocks(), row = split.first_row(block);
    const int64_t rows = split.first_row(block + 1) - row;
    alignas(64) PanelSums sums[kMostPanels];
    sum(x + row * in, rows, steps, panels, count, sums);
    for (int64_t p = 0; p < count; ++p) {
      if (soft_cap > 0) cap(rows, soft_cap, sums[p]);
      const int64_t corner = row * weight.features + (first + p) * kPanel;
      store(sums[p], rows, panels[p].features, added == nullptr ? nullptr : added + corner,
            product->y + corner, weight.features);
    }
  };
  return parallel_for(pool, split.threads(), groups * split.blocks(), std::move(task), split.threads());
}

template <typename T, typename W>
ffi::Future multiply_gated(ffi::ThreadPool& pool, Sums<T, W> sum, StoreGated<T> store, const LinearCall& call,
                           const Weight<T, W>& gate, const Weight<T, W>& up, T* y) {
  const int64_t in = gate.in, steps = in / kInputsPerStep<T>, features = gate.features;
  const Split split(pool, scalar(call.live), gate.panels(), 2, steps, kStepBytes<T, W>);
  const T* x = data<const T>(call.x);
  auto task = [=](int64_t index) {
    const int64_t first = index / split.blocks() * split.group();
    const int64_t count = std::min(split.group(), gate.panels() - first);
    Panel<T, W> panels[kMostPanels];
    for (int64_t p = 0; p < count; ++p) {
      panels[p] = gate.panel(first + p, count);
      panels[count + p] = up.panel(first + p, count);
    }
    const int64_t block = index % split.blocks(), row = split.first_row(block);
    const int64_t rows = split.first_row(block + 1) - row;
    alignas(64) PanelSums sums[kMostPanels];
    sum(x + row * in, rows, steps, panels, 2 * count, sums);
    for (int64_t p = 0; p < count; ++p) {
      store(sums[p], sums[count + p], rows, panels[p].features, y + row * features + (first + p) * kPanel,
            features);
    }
  };
  return parallel_for(pool, split.threads(), split.groups(gate.panels()) * split.blocks(), task,
                      split.threads());
}

ffi::Future linear(ffi::ThreadPool pool, Operand x, Operand layer, Operand live, Operand residual,
                   ffi::RemainingArgs rest, ffi::RemainingRets results, float soft_cap) {
  const LinearCall call{x, layer, live};
  std::string problem = call.problem();
  if (!problem.empty()) return failed("linear: " + problem);
  if (results.empty() || rest.size() != 3 * results.size()) {
    return failed("linear: every result must have a weight, its scales and a bias");
  }
  std::vector<WeightOperands> weights;
  std::vector<Operand> ys;
  for (size_t i = 0; i < results.size(); ++i) {
    const auto operand = [&](size_t place) { return *rest.get<Operand>(3 * i + place); };
    weights.push_back({operand(0), operand(1), operand(2)});
    ys.push_back(**results.get<Operand>(i));
  }
  const bool is_quantized = weights[0].is_quantized();

  const ffi::DataType out = ys[0].element_type();
  if (out != x.element_type() && out != ffi::F32) return failed("linear: y must be float32 or like x");
  for (size_t i = 0; i < ys.size(); ++i) {
    if (!call.is_output(ys[i], out)) return failed("linear: results must be [T, features], in one dtype");
    problem = call.problem_of("weight " + std::to_string(i), weights[i], ys[i].dimensions()[1]);
    if (!problem.empty()) return failed("linear: " + problem);
    if (weights[i].is_quantized() != is_quantized) return failed("linear: some weights alone are int8");
  }
  if (!is_absent(residual) &&
      (ys.size() != 1 || !call.is_output(residual, x.element_type(), ys[0].dimensions()[1]))) {
    return failed("linear: residual must be like the one result, in the dtype of x");
  }

  return with_sums(call.has_pairs(), is_quantized, [&](auto sum) {
    const auto run = [&](auto store) {
      return multiply(pool, sum, store, call, weights, ys, residual, soft_cap);
    };
    const LinearTable& table = kernels().linear;
    if constexpr (std::is_same_v<typename decltype(sum)::Input, float>) {
      return run(table.store_f32);
    } else {
      return out == ffi::F32 ? run(table.store_bf16_as_f32) : run(table.store_bf16);
    }
  });
}

ffi::Future gated_linear(ffi::ThreadPool pool, Operand x, Operand layer, Operand live, Operand gate_matrix,
                         Operand gate_scales, Operand gate_bias, Operand up_matrix, Operand up_scales,
                         Operand up_bias, Result y, std::string_view activation) {
  const LinearCall call{x, layer, live};
  std::string problem = call.problem();
  if (!problem.empty()) return failed("gated_linear: " + problem);
  if (!call.is_output(*y, x.element_type())) return failed("gated_linear: y must be [T, features] like x");
  const int64_t features = y->dimensions()[1];
  const WeightOperands gate{gate_matrix, gate_scales, gate_bias}, up{up_matrix, up_scales, up_bias};
  problem = call.problem_of("gate", gate, features);
  if (problem.empty()) problem = call.problem_of("up", up, features);
  if (!problem.empty()) return failed("gated_linear: " + problem);
  if (gate.is_quantized() != up.is_quantized()) return failed("gated_linear: gate or up alone is int8");
  const int64_t index = activation_of(activation);
  if (index == kActivations) return failed("gated_linear: there is no activation " + std::string(activation));

  return with_sums(call.has_pairs(), gate.is_quantized(), [&](auto sum) {
    using T = typename decltype(sum)::Input;
    using W = typename decltype(sum)::Stored;
    return multiply_gated<T, W>(pool, sum, store_gated<T>(index), call, call.weight<T, W>(gate, features),
                                call.weight<T, W>(up, features), data<T>(*y));
  });
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
                                  .RemainingRets()
                                  .Attr<float>("soft_cap"));

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
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<std::string_view>("activation"));

}  // namespace hexserve
