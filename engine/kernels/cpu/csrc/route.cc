// route(scores float32 [T, experts], live; sigmoid, normalized)
//     -> experts int32 [T, top_k], weights float32 [T, top_k]

#include <algorithm>
#include <cmath>
#include <vector>

#include "operands.h"
#include "parallel.h"

namespace hexserve {
namespace {

constexpr int64_t kScoresPerTask = 4096;

struct Gate {
  bool sigmoid, normalized;
};

// The `top_k` highest scores of a token, of equal ones those of the lower ids; highest first.
void choose_top(const float* scores, int64_t experts, int64_t top_k, int32_t* chosen) {
  // NaN is above all, so that it is seen in what comes out.
  const auto is_above = [=](int64_t a, int64_t b) {
    return scores[a] > scores[b] || (std::isnan(scores[a]) && !std::isnan(scores[b]));
  };
  int64_t held = 0;
  for (int64_t expert = 0; expert < experts; ++expert) {
    int64_t place = held;
    while (place > 0 && is_above(expert, chosen[place - 1])) --place;
    if (place == top_k) continue;
    held = std::min(held + 1, top_k);
    std::copy_backward(chosen + place, chosen + held - 1, chosen + held);
    chosen[place] = int32_t(expert);
  }
}

void weigh(const float* scores, int64_t experts, const int32_t* chosen, int64_t top_k, Gate gate,
           float* weights) {
  const float top = scores[chosen[0]];
  float sum = 0;
  for (int64_t i = 0; i < top_k; ++i) {
    const float score = scores[chosen[i]];
    weights[i] = gate.sigmoid ? 1 / (1 + std::exp(-score)) : std::exp(score - top);
    sum += weights[i];
  }
  if (!gate.normalized) {
    if (gate.sigmoid) return;
    sum = 0;
    for (int64_t e = 0; e < experts; ++e) sum += std::exp(scores[e] - top);
  }
  for (int64_t i = 0; i < top_k; ++i) weights[i] /= sum;
}

ffi::Future route(ffi::ThreadPool pool, Operand scores, Operand live, Result chosen, Result weights,
                  bool sigmoid, bool normalized) {
  if (scores.element_type() != ffi::F32 || scores.dimensions().size() != 2) {
    return failed("route: the scores must be float32 [T, experts]");
  }
  const int64_t tokens = scores.dimensions()[0], experts = scores.dimensions()[1];
  const auto is_result = [&](const Operand& result, ffi::DataType dtype) {
    const auto shape = result.dimensions();
    return result.element_type() == dtype && shape.size() == 2 && shape[0] == tokens &&
           shape[1] == chosen->dimensions()[1];
  };
  if (!is_result(*chosen, ffi::S32) || !is_result(*weights, ffi::F32)) {
    return failed("route: the results must be int32 and float32 [T, top_k]");
  }
  const int64_t top_k = chosen->dimensions()[1];
  if (top_k < 1 || top_k > experts) return failed("route: top_k must be from 1 to the number of experts");
  if (!is_scalar(live)) return failed("route: live must be an int32 scalar");
  const int64_t rows = scalar(live);
  if (rows < 0 || rows > tokens) return failed("route: live is out of range");

  const float* from = data<const float>(scores);
  int32_t* ids = data<int32_t>(*chosen);
  float* to = data<float>(*weights);
  const Gate gate{sigmoid, normalized};
  const int64_t rows_per_task = std::max<int64_t>(1, kScoresPerTask / experts);
  return parallel_for(pool, threads_of(pool), (rows + rows_per_task - 1) / rows_per_task, [=](int64_t task) {
    const int64_t end = std::min(rows, (task + 1) * rows_per_task);
    for (int64_t t = task * rows_per_task; t < end; ++t) {
      choose_top(from + t * experts, experts, top_k, ids + t * top_k);
      weigh(from + t * experts, experts, ids + t * top_k, top_k, gate, to + t * top_k);
    }
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(hexserve_route, Guarded<route>::call,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // scores
                                  .Arg<ffi::AnyBuffer>()  // live
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("sigmoid")
                                  .Attr<bool>("normalized"));

}  // namespace hexserve
