// gated_experts(x [T, in], layer, live, experts [T, top_k], weights [T, top_k] or [0],
//               gate [layers, experts, panels, ...], scales [layers, experts, features] or [0],
//               bias likewise, up, scales, bias; activation) -> h [T * top_k, features]
// expert_sums(h [T * top_k, in], layer, live, experts, weights, down, scales, bias)
//     -> y float32 [T, features]
//
// Rows of h are routed rows in the order of experts, that is of Routed: both calls sort alike. The
// weights multiply x, or what is added up in y.
//
// A token's outputs are added up by one task in the order of its experts, so their bits depend on no
// other token.

#include <cstring>
#include <memory>
#include <string>
#include <string_view>

#include "linear_loops.h"
#include "linear_operands.h"
#include "routed.h"
#include "scratch.h"

namespace hexserve {
namespace {

constexpr int64_t kTasksPerThread = 8;

// Contiguous columns of about equal number, as many as there are tasks for.
class Spans {
 public:
  Spans(int64_t columns, int64_t wanted)
      : columns_(columns), count_(std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, columns))) {}

  int64_t count() const { return count_; }
  int64_t first(int64_t span) const { return columns_ * span / count_; }
  int64_t end(int64_t span) const { return first(span + 1); }

 private:
  int64_t columns_, count_;
};

// A weight of each expert.
template <typename T, typename W>
struct ExpertWeights {
  Weight<T, W> first;

  Weight<T, W> of(int64_t expert) const {
    const int64_t row = expert * first.features;
    return {first.data + expert * first.panels() * kPanel * first.in,
            first.scales == nullptr ? nullptr : first.scales + row,
            first.bias == nullptr ? nullptr : first.bias + row, first.in, first.features};
  }
};

int64_t threads_for_blocks(const ffi::ThreadPool& pool, const Routed& routed, int64_t panels, int64_t steps,
                           int64_t step_bytes) {
  int64_t rows = 0;
  for (const Routed::Block& block : routed.blocks) rows += std::max(block.rows, rows_per_read(step_bytes));
  return threads_for(pool, rows, panels, steps, step_bytes);
}

template <typename T>
WeighRow<T> weigh_row() {
  if constexpr (std::is_same_v<T, float>) {
    return kernels().experts.weigh_f32;
  } else {
    return kernels().experts.weigh_bf16;
  }
}

template <typename T, typename W>
ffi::Future multiply_gated(ffi::ThreadPool& pool, Sums<T, W> sum, StoreGated<T> store,
                           std::shared_ptr<const Routed> routed, const T* x, ExpertWeights<T, W> gate,
                           ExpertWeights<T, W> up, T* h) {
  const int64_t in = gate.first.in, steps = in / kInputsPerStep<T>, features = gate.first.features;
  const int64_t columns = gate.first.panels(), blocks = int64_t(routed->blocks.size());
  const int64_t threads = threads_for_blocks(pool, *routed, 2 * columns, steps, kStepBytes<T, W>);
  const Spans spans(columns, threads * kTasksPerThread / std::max<int64_t>(1, blocks));
  const WeighRow<T> weigh = weigh_row<T>();
  auto task = [=](int64_t index) {
    const Routed::Block& block = routed->blocks[index / spans.count()];
    const Weight<T, W> own_gate = gate.of(block.expert), own_up = up.of(block.expert);
    thread_local Scratch scratch;
    scratch.reset(Scratch::bytes_of<T>(block.rows * in));
    T* rows = scratch.take<T>(block.rows * in);
    for (int64_t i = 0; i < block.rows; ++i) {
      const T* from = x + routed->token[block.first + i] * in;
      if (routed->weight.empty()) {
        std::memcpy(rows + i * in, from, in * sizeof(T));
      } else {
        weigh(from, routed->weight[block.first + i], rows + i * in, in);
      }
    }
    constexpr int64_t kMostColumns = kMostPanels / 2;
    const int64_t end = spans.end(index % spans.count());
    for (int64_t first = spans.first(index % spans.count()); first < end; first += kMostColumns) {
      const int64_t count = std::min(kMostColumns, end - first);
      Panel<T, W> panels[kMostPanels];
      for (int64_t p = 0; p < count; ++p) {
        panels[p] = own_gate.panel(first + p, count);
        panels[count + p] = own_up.panel(first + p, count);
      }
      alignas(64) PanelSums sums[kMostPanels];
      sum(rows, block.rows, steps, panels, 2 * count, sums);
      for (int64_t p = 0; p < count; ++p) {
        store(sums[p], sums[count + p], block.rows, panels[p].features,
              h + block.first * features + (first + p) * kPanel, features);
      }
    }
  };
  return parallel_for(pool, threads, blocks * spans.count(), std::move(task), threads);
}

template <typename T, typename W>
ffi::Future add_up(ffi::ThreadPool& pool, Sums<T, W> sum, std::shared_ptr<const Routed> routed, int64_t live,
                   const T* h, ExpertWeights<T, W> down, float* y) {
  const int64_t in = down.first.in, steps = in / kInputsPerStep<T>, features = down.first.features;
  const int64_t columns = down.first.panels();
  const int64_t threads = threads_for_blocks(pool, *routed, columns, steps, kStepBytes<T, W>);
  const Spans spans(columns, threads * kTasksPerThread);
  const AddSums add = kernels().experts.add;
  auto task = [=](int64_t span) {
    const int64_t begin = spans.first(span), end = spans.end(span);
    const int64_t width = std::min(end * kPanel, features) - begin * kPanel;
    for (int64_t t = 0; t < live; ++t)
      std::memset(y + t * features + begin * kPanel, 0, width * sizeof(float));
    for (const Routed::Block& block : routed->blocks) {
      const Weight<T, W> own = down.of(block.expert);
      for (int64_t first = begin; first < end; first += kMostPanels) {
        const int64_t count = std::min(kMostPanels, end - first);
        Panel<T, W> panels[kMostPanels];
        for (int64_t p = 0; p < count; ++p) panels[p] = own.panel(first + p, count);
        alignas(64) PanelSums sums[kMostPanels];
        sum(h + block.first * in, block.rows, steps, panels, count, sums);
        for (int64_t p = 0; p < count; ++p) {
          add(sums[p], block.rows, panels[p].features, routed->token.data() + block.first,
              routed->weights_of(block), y + (first + p) * kPanel, features);
        }
      }
    }
  };
  return parallel_for(pool, threads, columns == 0 ? 0 : spans.count(), std::move(task), threads);
}

// What is wrong with the stacked weights of a call, and with its routing.
std::string problem_of(const LinearCall& call, const RoutingOperands& routing, const std::string& name,
                       const WeightOperands& weight, int64_t features) {
  std::string problem = call.problem_of(name, weight, features);
  if (problem.empty()) problem = routing.problem(scalar(call.live), weight.matrix.dimensions()[1]);
  return problem;
}

ffi::Future gated_experts(ffi::ThreadPool pool, Operand x, Operand layer, Operand live, Operand experts,
                          Operand weights, Operand gate_matrix, Operand gate_scales, Operand gate_bias,
                          Operand up_matrix, Operand up_scales, Operand up_bias, Result h,
                          std::string_view activation) {
  const LinearCall call{x, layer, live, 2};
  const RoutingOperands routing{experts, weights};
  std::string problem = call.problem();
  if (!problem.empty()) return failed("gated_experts: " + problem);
  if (h->dimensions().size() != 2 || h->element_type() != x.element_type()) {
    return failed("gated_experts: h must be [T * top_k, features] like x");
  }
  const int64_t features = h->dimensions()[1];
  const WeightOperands gate{gate_matrix, gate_scales, gate_bias}, up{up_matrix, up_scales, up_bias};
  problem = problem_of(call, routing, "gate", gate, features);
  if (problem.empty()) problem = problem_of(call, routing, "up", up, features);
  if (!problem.empty()) return failed("gated_experts: " + problem);
  if (routing.tokens() != call.rows() || h->dimensions()[0] != call.rows() * routing.top_k()) {
    return failed("gated_experts: x, the routing and h must be of the same tokens");
  }
  if (gate.is_quantized() != up.is_quantized()) return failed("gated_experts: gate or up alone is int8");
  const int64_t index = activation_of(activation);
  if (index == kActivations)
    return failed("gated_experts: there is no activation " + std::string(activation));

  const auto routed =
      std::make_shared<const Routed>(routing.sorted(scalar(live), gate_matrix.dimensions()[1]));
  return with_sums(call.has_pairs(), gate.is_quantized(), [&](auto sum) {
    using T = typename decltype(sum)::Input;
    using W = typename decltype(sum)::Stored;
    return multiply_gated<T, W>(pool, sum, store_gated<T>(index), routed, data<const T>(x),
                                {call.weight<T, W>(gate, features)}, {call.weight<T, W>(up, features)},
                                data<T>(*h));
  });
}

ffi::Future expert_sums(ffi::ThreadPool pool, Operand h, Operand layer, Operand live, Operand experts,
                        Operand weights, Operand matrix, Operand scales, Operand bias, Result y) {
  const LinearCall call{h, layer, live, 2};
  const RoutingOperands routing{experts, weights};
  std::string problem = call.problem();
  if (!problem.empty()) return failed("expert_sums: " + problem);
  if (y->dimensions().size() != 2 || y->element_type() != ffi::F32) {
    return failed("expert_sums: y must be float32 [T, features]");
  }
  const int64_t features = y->dimensions()[1];
  const WeightOperands down{matrix, scales, bias};
  problem = problem_of(call, routing, "down", down, features);
  if (!problem.empty()) return failed("expert_sums: " + problem);
  if (routing.tokens() != y->dimensions()[0] || call.rows() != routing.tokens() * routing.top_k()) {
    return failed("expert_sums: h, the routing and y must be of the same tokens");
  }

  const auto routed = std::make_shared<const Routed>(routing.sorted(scalar(live), matrix.dimensions()[1]));
  return with_sums(call.has_pairs(), down.is_quantized(), [&](auto sum) {
    using T = typename decltype(sum)::Input;
    using W = typename decltype(sum)::Stored;
    return add_up<T, W>(pool, sum, routed, scalar(live), data<const T>(h),
                        {call.weight<T, W>(down, features)}, data<float>(*y));
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(hexserve_gated_experts, Guarded<gated_experts>::call,
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
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<std::string_view>("activation"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(hexserve_expert_sums, Guarded<expert_sums>::call,
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
                                  .Ret<ffi::AnyBuffer>());

}  // namespace hexserve
