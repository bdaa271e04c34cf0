// sample(logits [S, V], temperature, top_k, top_p, min_p, presence, frequency, repetition [S],
//        seed [S, 2], choice, position, slot, biases, bias_slot, scored [S],
//        bias_ids, bias_values [slots, B], counts [slots, V], num_rows)
//     -> tokens, logprobs [S], top_ids, top_logprobs [S, K], counts in place
//
// See engine/sampling.py.

#include <algorithm>
#include <string>
#include <vector>

#include "kernel_table.h"
#include "operands.h"
#include "parallel.h"
#include "sample_row.h"

namespace hexserve {
namespace {

constexpr int64_t kElementsPerTask = 16384;
constexpr int32_t kCountStep = 2;  // of one more time in the output

struct Batch {
  const SampleTable* table;
  int64_t vocab, best, most_biases;
  const float* logits;
  const float *temperature, *top_p, *min_p, *presence, *frequency, *repetition;
  const int32_t *top_k, *choice, *position, *slot, *biases, *bias_slot, *bias_ids;
  const float* bias_values;
  const uint32_t* seed;
  const uint8_t* scored;
  int32_t *counts, *tokens, *top_ids;
  float *logprobs, *top_logprobs;

  void run(int64_t row) const {
    thread_local Scratch scratch;
    RowSampler sampler(*table, scratch, vocab);
    const float* const raw = logits + row * vocab;
    const float* used = raw;
    if (biases[row] > 0) {
      const int64_t first = bias_slot[row] * most_biases;
      used = sampler.bias(raw, bias_ids + first, bias_values + first, biases[row]);
    }
    int32_t* const own_counts = slot[row] < 0 ? nullptr : counts + slot[row] * vocab;
    if (own_counts != nullptr) {
      used = sampler.penalize(used, own_counts, {presence[row], frequency[row], repetition[row]});
    }
    const NoiseOf noise = {seed[2 * row], seed[2 * row + 1], choice[row], position[row]};
    const int32_t token =
        sampler.choose(used, {temperature[row], top_k[row], top_p[row], min_p[row], noise});
    tokens[row] = token;
    if (own_counts != nullptr) own_counts[token] += kCountStep;
    RowScores scores = {0, top_ids + row * best, top_logprobs + row * best};
    if (scored[row]) {
      sampler.score(raw, token, best, scores);
    } else {
      clear(row);
    }
    logprobs[row] = scores.logprob;
  }

  void clear(int64_t row) const {
    logprobs[row] = 0;
    std::fill_n(top_ids + row * best, best, 0);
    std::fill_n(top_logprobs + row * best, best, 0.0f);
  }
};

// Empty, or what is wrong with the slots of the first `live` rows.
std::string problem_of_slots(const int32_t* slot, int64_t live, int64_t slots) {
  std::vector<bool> taken(slots);
  for (int64_t row = 0; row < live; ++row) {
    if (slot[row] < 0) continue;
    if (slot[row] >= slots) return "slot is out of range";
    // Rows run at once.
    if (taken[slot[row]]) return "slot is that of two rows";
    taken[slot[row]] = true;
  }
  return "";
}

ffi::Future sample(ffi::ThreadPool pool, Operand logits, Operand temperature, Operand top_k, Operand top_p,
                   Operand min_p, Operand presence, Operand frequency, Operand repetition, Operand seed,
                   Operand choice, Operand position, Operand slot, Operand biases, Operand bias_slot,
                   Operand scored, Operand bias_ids, Operand bias_values, Operand counts, Operand num_rows, Result tokens, Result logprobs, Result top_ids, Result top_logprobs,
                   Result counts_out) {
  const auto wrong = [](const std::string& what) { return failed("sample: " + what); };
  const auto shape = logits.dimensions();
  if (logits.element_type() != ffi::F32 || shape.size() != 2) return wrong("logits must be float32 [S, V]");
  const int64_t rows = shape[0], vocab = shape[1];
  if (vocab < 1 || vocab > kMostTokens) {
    return wrong("logits must have 1 to " + std::to_string(kMostTokens) + " tokens");
  }
  const auto is_column = [&](const Operand& operand, ffi::DataType dtype) {
    const auto sizes = operand.dimensions();
    return operand.element_type() == dtype && sizes.size() == 1 && sizes[0] == rows;
  };
  const struct {
    const char* name;
    const Operand& operand;
    ffi::DataType dtype;
    const char* called;
  } columns[] = {
      {"temperature", temperature, ffi::F32, "float32"}, {"top_k", top_k, ffi::S32, "int32"},
      {"top_p", top_p, ffi::F32, "float32"},             {"min_p", min_p, ffi::F32, "float32"},
      {"presence", presence, ffi::F32, "float32"},       {"frequency", frequency, ffi::F32, "float32"},
      {"repetition", repetition, ffi::F32, "float32"},   {"choice", choice, ffi::S32, "int32"},
      {"position", position, ffi::S32, "int32"},         {"slot", slot, ffi::S32, "int32"},
      {"biases", biases, ffi::S32, "int32"},             {"bias_slot", bias_slot, ffi::S32, "int32"},
      {"scored", scored, ffi::PRED, "bool"},             {"tokens", *tokens, ffi::S32, "int32"},
      {"logprobs", *logprobs, ffi::F32, "float32"},
  };
  for (const auto& column : columns) {
    if (!is_column(column.operand, column.dtype)) {
      return wrong(std::string(column.name) + " must be " + column.called + " [S]");
    }
  }
  const auto is_table = [](const Operand& operand, ffi::DataType dtype) {
    return operand.element_type() == dtype && operand.dimensions().size() == 2;
  };
  if (!is_table(seed, ffi::U32) || seed.dimensions()[0] != rows || seed.dimensions()[1] != 2) {
    return wrong("seed must be uint32 [S, 2]");
  }
  if (!is_int32(counts, 2) || counts.dimensions()[1] != vocab) {
    return wrong("counts must be int32 [slots, V]");
  }
  if (!are_alike(counts, *counts_out) || counts.untyped_data() != counts_out->untyped_data()) {
    return wrong("counts must be aliased to the result");
  }
  if (!is_int32(bias_ids, 2)) return wrong("bias_ids must be int32 [slots, B]");
  const auto entries = bias_ids.dimensions();
  if (!is_table(bias_values, ffi::F32) || bias_values.dimensions()[0] != entries[0] ||
      bias_values.dimensions()[1] != entries[1]) {
    return wrong("bias_values must be float32 [slots, B]");
  }
  const auto best = top_ids->dimensions();
  if (!is_int32(*top_ids, 2) || best[0] != rows || best[1] < 1 || best[1] > vocab) {
    return wrong("top_ids must be int32 [S, K] with K of 1 to V");
  }
  if (!is_table(*top_logprobs, ffi::F32) || top_logprobs->dimensions()[0] != rows ||
      top_logprobs->dimensions()[1] != best[1]) {
    return wrong("top_logprobs must be float32 [S, K]");
  }
  if (!is_scalar(num_rows)) return wrong("num_rows must be an int32 scalar");
  const int64_t live = scalar(num_rows);
  if (live < 0 || live > rows) return wrong("num_rows is out of range");
  const std::string problem = problem_of_slots(data<const int32_t>(slot), live, counts.dimensions()[0]);
  if (!problem.empty()) return wrong(problem);
  for (int64_t row = 0; row < live; ++row) {
    const int64_t used = data<const int32_t>(biases)[row], own = data<const int32_t>(bias_slot)[row];
    if (used < 0 || used > entries[1]) return wrong("biases are out of range");
    if (used > 0 && (own < 0 || own >= entries[0])) return wrong("bias_slot is out of range");
  }

  Batch batch = {};
  batch.table = &kernels().sample;
  batch.vocab = vocab, batch.best = best[1], batch.most_biases = entries[1];
  batch.biases = data<const int32_t>(biases), batch.bias_slot = data<const int32_t>(bias_slot);
  batch.bias_ids = data<const int32_t>(bias_ids), batch.bias_values = data<const float>(bias_values);
  batch.logits = data<const float>(logits);
  batch.temperature = data<const float>(temperature), batch.top_k = data<const int32_t>(top_k);
  batch.top_p = data<const float>(top_p), batch.min_p = data<const float>(min_p);
  batch.presence = data<const float>(presence), batch.frequency = data<const float>(frequency);
  batch.repetition = data<const float>(repetition), batch.seed = data<const uint32_t>(seed);
  batch.choice = data<const int32_t>(choice), batch.position = data<const int32_t>(position);
  batch.slot = data<const int32_t>(slot), batch.scored = data<const uint8_t>(scored);
  batch.counts = data<int32_t>(counts), batch.tokens = data<int32_t>(*tokens);
  batch.logprobs = data<float>(*logprobs), batch.top_ids = data<int32_t>(*top_ids);
  batch.top_logprobs = data<float>(*top_logprobs);
  for (int64_t row = live; row < rows; ++row) {
    batch.tokens[row] = 0;
    batch.clear(row);
  }
  const int64_t rows_per_task = std::max<int64_t>(1, kElementsPerTask / vocab);
  const int64_t tasks = (live + rows_per_task - 1) / rows_per_task;
  return parallel_for(pool, threads_of(pool), tasks, [=](int64_t task) {
    const int64_t end = std::min(live, (task + 1) * rows_per_task);
    for (int64_t row = task * rows_per_task; row < end; ++row) batch.run(row);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(hexserve_sample, Guarded<sample>::call,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()   // logits
                                  .Arg<ffi::AnyBuffer>()   // temperature
                                  .Arg<ffi::AnyBuffer>()   // top_k
                                  .Arg<ffi::AnyBuffer>()   // top_p
                                  .Arg<ffi::AnyBuffer>()   // min_p
                                  .Arg<ffi::AnyBuffer>()   // presence
                                  .Arg<ffi::AnyBuffer>()   // frequency
                                  .Arg<ffi::AnyBuffer>()   // repetition
                                  .Arg<ffi::AnyBuffer>()   // seed
                                  .Arg<ffi::AnyBuffer>()   // choice
                                  .Arg<ffi::AnyBuffer>()   // position
                                  .Arg<ffi::AnyBuffer>()   // slot
                                  .Arg<ffi::AnyBuffer>()   // biases
                                  .Arg<ffi::AnyBuffer>()   // bias_slot
                                  .Arg<ffi::AnyBuffer>()   // scored
                                  .Arg<ffi::AnyBuffer>()   // bias_ids
                                  .Arg<ffi::AnyBuffer>()   // bias_values
                                  .Arg<ffi::AnyBuffer>()   // counts
                                  .Arg<ffi::AnyBuffer>()   // num_rows
                                  .Ret<ffi::AnyBuffer>()   // tokens
                                  .Ret<ffi::AnyBuffer>()   // logprobs
                                  .Ret<ffi::AnyBuffer>()   // top_ids
                                  .Ret<ffi::AnyBuffer>()   // top_logprobs
                                  .Ret<ffi::AnyBuffer>());  // counts

}  // namespace hexserve
