// score(logits [S, V], tokens [S], num_rows) -> logprobs [S], top_ids, top_logprobs [S, K]
//
// See engine/sampling.py.

#include <algorithm>
#include <string>

#include "kernel_table.h"
#include "operands.h"
#include "parallel.h"
#include "sample_row.h"

namespace hexserve {
namespace {

ffi::Future score(ffi::ThreadPool pool, Operand logits, Operand tokens, Operand num_rows, Result logprobs,
                  Result top_ids, Result top_logprobs) {
  const auto wrong = [](const std::string& what) { return failed("score: " + what); };
  const auto shape = logits.dimensions();
  if (logits.element_type() != ffi::F32 || shape.size() != 2) return wrong("logits must be float32 [S, V]");
  const int64_t rows = shape[0], vocab = shape[1];
  if (vocab < 1 || vocab > kMostTokens) {
    return wrong("logits must have 1 to " + std::to_string(kMostTokens) + " tokens");
  }
  if (!is_int32(tokens, 1) || tokens.dimensions()[0] != rows) return wrong("tokens must be int32 [S]");
  if (logprobs->element_type() != ffi::F32 || logprobs->dimensions().size() != 1 ||
      logprobs->dimensions()[0] != rows) {
    return wrong("logprobs must be float32 [S]");
  }
  const auto best = top_ids->dimensions();
  if (!is_int32(*top_ids, 2) || best[0] != rows || best[1] < 1 || best[1] > vocab) {
    return wrong("top_ids must be int32 [S, K] with K of 1 to V");
  }
  const auto sizes = top_logprobs->dimensions();
  if (top_logprobs->element_type() != ffi::F32 || sizes.size() != 2 || sizes[0] != rows || sizes[1] != best[1]) {
    return wrong("top_logprobs must be float32 [S, K]");
  }
  if (!is_scalar(num_rows)) return wrong("num_rows must be an int32 scalar");
  const int64_t live = scalar(num_rows);
  if (live < 0 || live > rows) return wrong("num_rows is out of range");
  const int32_t* const ids = data<const int32_t>(tokens);
  for (int64_t row = 0; row < live; ++row) {
    if (ids[row] < 0 || ids[row] >= vocab) return wrong("a token is outside of the vocabulary");
  }

  const SampleTable* const table = &kernels().sample;
  const float* const from = data<const float>(logits);
  float *const own = data<float>(*logprobs), *const values = data<float>(*top_logprobs);
  int32_t* const likeliest = data<int32_t>(*top_ids);
  const int64_t count = best[1];
  std::fill(own + live, own + rows, 0.0f);
  std::fill(likeliest + live * count, likeliest + rows * count, 0);
  std::fill(values + live * count, values + rows * count, 0.0f);
  return parallel_for(pool, threads_of(pool), live, [=](int64_t row) {
    thread_local Scratch scratch;
    RowSampler sampler(*table, scratch, vocab);
    RowScores scores = {0, likeliest + row * count, values + row * count};
    sampler.score(from + row * vocab, ids[row], count, scores);
    own[row] = scores.logprob;
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(hexserve_score, Guarded<score>::call,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()   // logits
                                  .Arg<ffi::AnyBuffer>()   // tokens
                                  .Arg<ffi::AnyBuffer>()   // num_rows
                                  .Ret<ffi::AnyBuffer>()   // logprobs
                                  .Ret<ffi::AnyBuffer>()   // top_ids
                                  .Ret<ffi::AnyBuffer>());  // top_logprobs

}  // namespace hexserve
