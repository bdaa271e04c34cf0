// attention(q [T, heads, head_dim], k and v [layers, blocks, block_size, kv_heads, head_dim],
//           layer, starts [S + 1], tables [S, B], kv_lens [S], num_rows)
//     -> out [T, heads, head_dim]

#include "attention_call.h"
#include "kernel_table.h"
#include "operands.h"
#include "parallel.h"

namespace hexserve {
namespace {

constexpr int64_t kLeastHeadDim = 16, kMostHeadDim = 256;

template <typename Q, typename T>
ffi::Future attend(ffi::ThreadPool& pool, const Shape& shape, const Scoring& scoring,
                   const Visibility& visibility, const Operand& q, const Operand& k, const Operand& v,
                   int64_t layer_offset, Operand& out, AttentionPlan plan) {
  auto call = std::make_shared<Attention<Q, T>>(
      kernels().attention, shape, scoring, visibility, data<const Q>(q), data<const T>(k) + layer_offset,
      data<const T>(v) + layer_offset, data<Q>(out), std::move(plan), threads_of(pool));
  return parallel_for(pool, threads_of(pool), call->tasks(), [call](int64_t i) { call->run(i); });
}

// The live rows that have tokens; an error, in words, where their numbers lead out of a buffer.
std::string read_rows(const Operand& starts, const Operand& kv_lens, int64_t num_rows, int64_t tokens,
                      int64_t pool_blocks, const Shape& shape, const Visibility& visibility,
                      std::vector<AttentionRow>& rows) {
  const int32_t* start = data<const int32_t>(starts);
  const int32_t* lengths = data<const int32_t>(kv_lens);
  if (num_rows > 0 && start[0] < 0) return "starts is negative";
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t count = int64_t(start[row + 1]) - start[row], length = lengths[row];
    if (count < 0 || start[row + 1] > tokens) return "starts decreases or leads out of q";
    if (count == 0) continue;
    if (length < count) return "kv_lens is less than the tokens of a row";
    if (length > shape.table_blocks * shape.block_size) return "kv_lens is more than tables hold";
    const int64_t position = length - count;
    const int32_t* blocks = shape.tables + row * shape.table_blocks;
    const int64_t last = (length - 1) / shape.block_size;
    for (int64_t i = visibility.first_seen(position) / shape.block_size; i <= last; ++i) {
      if (blocks[i] < 0 || blocks[i] >= pool_blocks) return "tables names a block outside of the pool";
    }
    rows.push_back({row, start[row], count, position});
  }
  return "";
}

ffi::Future attention(ffi::ThreadPool pool, Operand q, Operand k, Operand v, Operand layer, Operand starts,
                      Operand tables, Operand kv_lens, Operand num_rows, Result out, float scale,
                      float soft_cap, int64_t window, int64_t chunk) {
  const auto wrong = [](const std::string& what) { return failed("attention: " + what); };
  const auto sizes = k.dimensions();
  if (!is_float(q, 3) || !are_alike(q, *out)) {
    return wrong("q [T, heads, head_dim] must be float32 or bfloat16, and the result like it");
  }
  if (!is_float(k, 5) || !are_alike(k, v)) {
    return wrong("k and v must be pools of one shape, float32 or bfloat16");
  }
  const int64_t heads = q.dimensions()[1], head_dim = q.dimensions()[2], kv_heads = sizes[3];
  if (sizes[4] != head_dim || kv_heads < 1 || heads < 1 || heads % kv_heads != 0 ||
      head_dim < kLeastHeadDim || head_dim > kMostHeadDim || head_dim % 2 != 0) {
    return wrong("the heads of q do not fit those of the pools");
  }
  if (!is_int32(starts, 1) || !is_int32(kv_lens, 1) || !is_int32(tables, 2) ||
      starts.dimensions()[0] != kv_lens.dimensions()[0] + 1 ||
      tables.dimensions()[0] != kv_lens.dimensions()[0]) {
    return wrong("starts [S + 1], tables [S, B] and kv_lens [S] must be int32 and fit together");
  }
  if (!is_scalar(layer) || !is_scalar(num_rows)) return wrong("layer and num_rows must be int32 scalars");
  const int64_t index = scalar(layer), live = scalar(num_rows);
  if (index < 0 || index >= sizes[0]) return wrong("layer is out of range");
  if (live < 0 || live > kv_lens.dimensions()[0]) return wrong("num_rows is out of range");
  if (window < 0 || chunk < 0 || !(soft_cap >= 0)) return wrong("window, chunk or soft_cap is negative");

  const Shape shape = {heads,
                       kv_heads,
                       heads / kv_heads,
                       head_dim,
                       (head_dim + kWidest - 1) / kWidest * kWidest,
                       sizes[2],
                       tables.dimensions()[1],
                       data<const int32_t>(tables)};
  const Visibility visibility = {window, chunk};
  const Scoring scoring = {head_dim, scale, soft_cap};
  std::vector<AttentionRow> rows;
  const std::string error =
      read_rows(starts, kv_lens, live, q.dimensions()[0], sizes[1], shape, visibility, rows);
  if (!error.empty()) return wrong(error);
  AttentionPlan plan = plan_attention(rows, visibility, kv_heads, shape.group, threads_of(pool));
  const int64_t offset = index * sizes[1] * sizes[2] * kv_heads * head_dim;
  const bool wide_q = q.element_type() == ffi::F32, wide_pools = k.element_type() == ffi::F32;
  const auto chosen = wide_q ? (wide_pools ? attend<float, float> : attend<float, uint16_t>)
                             : (wide_pools ? attend<uint16_t, float> : attend<uint16_t, uint16_t>);
  return chosen(pool, shape, scoring, visibility, q, k, v, offset, *out, std::move(plan));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(hexserve_attention, Guarded<attention>::call,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // q
                                  .Arg<ffi::AnyBuffer>()  // k
                                  .Arg<ffi::AnyBuffer>()  // v
                                  .Arg<ffi::AnyBuffer>()  // layer
                                  .Arg<ffi::AnyBuffer>()  // starts
                                  .Arg<ffi::AnyBuffer>()  // tables
                                  .Arg<ffi::AnyBuffer>()  // kv_lens
                                  .Arg<ffi::AnyBuffer>()  // num_rows
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("chunk"));

}  // namespace hexserve
