// What moves KV: pools are [layers, blocks, block_size, kv_heads, head_dim], and slots number the
// tokens of a layer.
//
// write_kv(k_pool, v_pool, layer, slots [T], k, v [T, kv_heads, head_dim], live)
//     -> k_pool, v_pool in place
// export_kv(pool, slots [n], live, first_layer, first_head)
//     -> values [count of layers, n, count of heads, head_dim]
// import_kv(pool, slots [n], live, values, first_layer, first_head) -> pool in place
// copy_blocks(pool, sources [n], targets [n], live) -> pool in place

#include <emmintrin.h>

#include <cstring>

#include "kernel_table.h"
#include "operands.h"
#include "parallel.h"

namespace hexserve {
namespace {

constexpr int64_t kBytesPerTask = 1 << 17;

// A block of a pool is seldom in a cache when it is written. Ordinary stores would read it first.
constexpr int64_t kLeastStreamed = 2048;

void copy_into_pool(char* to, const char* from, int64_t bytes) {
  constexpr int64_t kLine = 64;
  const int64_t head = -reinterpret_cast<intptr_t>(to) & (kLine - 1);
  const int64_t lines = (bytes - head) / kLine;
  if (bytes < kLeastStreamed) {
    std::memcpy(to, from, bytes);
    return;
  }
  std::memcpy(to, from, head);
  to += head, from += head;
  for (int64_t i = 0; i < lines; ++i, to += kLine, from += kLine) {
    for (int64_t part = 0; part < kLine; part += sizeof(__m128i)) {
      const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + part));
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + part), value);
    }
  }
  std::memcpy(to, from, bytes - head - lines * kLine);
  _mm_sfence();
}

// A block of a pool is seldom in a cache when it is read, and the next one lies somewhere else:
// what follows is fetched while this is copied. Fetching touches nothing, so it may go too far.
void copy_from_pool(char* to, const char* from, int64_t bytes, const char* next) {
  constexpr int64_t kLine = 64, kStep = 4 * kLine, kAhead = 24 * kStep;
  for (int64_t done = 0; done < bytes; done += kStep) {
    const char* ahead = done + kAhead < bytes ? from + done + kAhead : next + (done + kAhead - bytes);
    for (int64_t line = 0; line < kStep; line += kLine) _mm_prefetch(ahead + line, _MM_HINT_T1);
    std::memcpy(to + done, from + done, std::min(kStep, bytes - done));
  }
}

// Where the rows of a pool lie; sizes in bytes.
struct PoolShape {
  explicit PoolShape(const Operand& pool)
      : layers(pool.dimensions()[0]), blocks(pool.dimensions()[1]), slots(blocks * pool.dimensions()[2]),
        heads(pool.dimensions()[3]), head_dim(pool.dimensions()[4]),
        head(head_dim * int64_t(ffi::ByteWidth(pool.element_type()))), row(heads * head),
        block(pool.dimensions()[2] * row), layer(slots * row) {}

  int64_t layers, blocks, slots, heads, head_dim;
  int64_t head, row, block, layer;
};

// Calls f(slot, index, count) for each run of slots in the pool that follow one another, and
// dropped(index) for each that is outside.
template <typename F, typename Dropped>
void each_run(const int32_t* slots, int64_t begin, int64_t end, int64_t pool_slots, F f, Dropped dropped) {
  for (int64_t i = begin; i < end;) {
    const int64_t slot = slots[i];
    if (slot < 0 || slot >= pool_slots) {
      dropped(i++);
      continue;
    }
    int64_t count = 1;
    const int64_t most = std::min(end - i, pool_slots - slot);
    while (count < most && slots[i + count] == slot + count) ++count;
    f(slot, i, count);
    i += count;
  }
}

int64_t rows_per_task(int64_t row_bytes) {
  return std::max<int64_t>(1, kBytesPerTask / std::max<int64_t>(1, row_bytes));
}

bool is_pool(const Operand& pool) { return is_float(pool, 5); }

// An operand and the result that must be the same buffer.
bool is_in_place(const Operand& operand, const Operand& result) {
  return are_alike(operand, result) && operand.untyped_data() == result.untyped_data();
}

ffi::Future write_kv(ffi::ThreadPool pool, Operand k_pool, Operand v_pool, Operand layer, Operand slots,
                     Operand k, Operand v, Operand live, Result k_out, Result v_out) {
  const auto wrong = [](const std::string& what) { return failed("write_kv: " + what); };
  if (!is_pool(k_pool) || !are_alike(k_pool, v_pool)) {
    return wrong("k_pool and v_pool must be pools of one shape, float32 or bfloat16");
  }
  if (!is_in_place(k_pool, *k_out) || !is_in_place(v_pool, *v_out)) {
    return wrong("k_pool and v_pool must be aliased to the results");
  }
  const PoolShape shape(k_pool);
  if (!is_float(k, 3) || !are_alike(k, v) || k.dimensions()[1] != shape.heads ||
      k.dimensions()[2] != shape.head_dim) {
    return wrong("k and v [T, kv_heads, head_dim] must be float32 or bfloat16 and fit the pools");
  }
  if (!is_int32(slots, 1) || slots.dimensions()[0] != k.dimensions()[0]) {
    return wrong("slots must be int32 [T]");
  }
  if (!is_scalar(layer) || !is_scalar(live)) return wrong("layer and live must be int32 scalars");
  const int64_t index = scalar(layer), tokens = scalar(live);
  if (index < 0 || index >= shape.layers) return wrong("layer is out of range");
  if (tokens < 0 || tokens > slots.dimensions()[0]) return wrong("live is out of range");

  const bool from_f32 = k.element_type() == ffi::F32, to_f32 = k_pool.element_type() == ffi::F32;
  const int64_t elements = shape.heads * shape.head_dim;
  const int64_t row = elements * int64_t(ffi::ByteWidth(k.element_type()));
  const ConvertTable& convert = kernels().convert;
  const int32_t* slot_of = data<const int32_t>(slots);
  const char* sources[] = {data<const char>(k), data<const char>(v)};
  char* targets[] = {data<char>(*k_out) + index * shape.layer, data<char>(*v_out) + index * shape.layer};
  const int64_t chunk = rows_per_task(shape.row), chunks = (tokens + chunk - 1) / chunk;
  return parallel_for(pool, threads_of(pool), 2 * chunks, [=, &convert](int64_t task) {
    const char* source = sources[task / chunks];
    char* target = targets[task / chunks];
    const int64_t begin = task % chunks * chunk;
    const auto put = [&](int64_t slot, int64_t token, int64_t count) {
      const char* from = source + token * row;
      char* to = target + slot * shape.row;
      if (from_f32 == to_f32) {
        copy_into_pool(to, from, count * row);
      } else if (from_f32) {
        convert.narrow(reinterpret_cast<const float*>(from), reinterpret_cast<uint16_t*>(to),
                       count * elements);
      } else {
        convert.widen(reinterpret_cast<const uint16_t*>(from), reinterpret_cast<float*>(to),
                      count * elements);
      }
    };
    each_run(slot_of, begin, std::min(tokens, begin + chunk), shape.slots, put, [](int64_t) {});
  });
}

// Some layers and heads of the first `live` slots, and the values [layers, n, heads, head_dim]
// that come from there or go there.
struct Selection {
  const int32_t* slots;
  int64_t live, rows;
  int64_t first_layer, layers;
  int64_t first_head, heads;
};

// Fills `selection`; an error, in words, where it leads out of a buffer.
std::string select(const Operand& pool, const Operand& slots, const Operand& live, const Operand& first_layer,
                   const Operand& first_head, const Operand& values, Selection& selection) {
  if (!is_pool(pool)) return "pool must have five dimensions, float32 or bfloat16";
  if (!is_int32(slots, 1)) return "slots must be int32 [n]";
  if (!is_scalar(live) || !is_scalar(first_layer) || !is_scalar(first_head)) {
    return "live, first_layer and first_head must be int32 scalars";
  }
  const PoolShape shape(pool);
  const auto sizes = values.dimensions();
  if (!is_float(values, 4) || values.element_type() != pool.element_type() ||
      sizes[1] != slots.dimensions()[0] || sizes[3] != shape.head_dim) {
    return "values must be [layers, n, heads, head_dim] of the pool's type";
  }
  selection = {data<const int32_t>(slots), scalar(live), sizes[1], scalar(first_layer), sizes[0],
               scalar(first_head), sizes[2]};
  if (selection.live < 0 || selection.live > sizes[1]) return "live is out of range";
  if (selection.first_layer < 0 || selection.first_layer + selection.layers > shape.layers) {
    return "first_layer is out of range";
  }
  if (selection.first_head < 0 || selection.first_head + selection.heads > shape.heads) {
    return "first_head is out of range";
  }
  return "";
}

// Calls copy(in pool, in values, bytes, next in pool) for every stretch of memory that is whole on
// both sides, and dropped(in values, bytes) for what has no slot. What this thread copies next is
// a guess where it depends on the other threads.
template <typename Copy, typename Dropped>
ffi::Future each_stretch(ffi::ThreadPool& pool, const PoolShape& shape, const Selection& s, Copy copy,
                         Dropped dropped) {
  const int64_t row = s.heads * shape.head;
  const int64_t chunk = rows_per_task(row), chunks = (s.live + chunk - 1) / chunk;
  const int64_t threads = threads_of(pool);
  return parallel_for(pool, threads, s.layers * chunks, [=](int64_t task) {
    const int64_t layer = task / chunks, begin = task % chunks * chunk;
    const int64_t end = std::min(s.live, begin + chunk);
    const int64_t in_pool = (s.first_layer + layer) * shape.layer + s.first_head * shape.head;
    const int64_t in_values = layer * s.rows * row;
    const auto run = [&](int64_t slot, int64_t index, int64_t count) {
      // All heads of tokens that follow one another are one stretch.
      const int64_t stretch = s.heads == shape.heads ? count : 1;
      const int64_t next_run = index + count < end ? in_pool + s.slots[index + count] * shape.row
                                                   : in_pool + threads * shape.layer + s.slots[begin] * shape.row;
      for (int64_t i = 0; i < count; i += stretch) {
        const int64_t here = in_pool + (slot + i) * shape.row;
        const int64_t next = i + stretch < count ? here + shape.row : next_run;
        copy(here, in_values + (index + i) * row, stretch * row, next);
      }
    };
    each_run(s.slots, begin, end, shape.slots, run,
             [&](int64_t index) { dropped(in_values + index * row, row); });
  });
}

ffi::Future export_kv(ffi::ThreadPool threads, Operand pool, Operand slots, Operand live, Operand first_layer,
                      Operand first_head, Result values) {
  Selection selection;
  const std::string error = select(pool, slots, live, first_layer, first_head, *values, selection);
  if (!error.empty()) return failed("export_kv: " + error);
  const char* source = data<const char>(pool);
  char* target = data<char>(*values);
  return each_stretch(
      threads, PoolShape(pool), selection,
      [=](int64_t in_pool, int64_t in_values, int64_t bytes, int64_t next) {
        copy_from_pool(target + in_values, source + in_pool, bytes, source + next);
      },
      [=](int64_t in_values, int64_t bytes) { std::memset(target + in_values, 0, bytes); });
}

ffi::Future import_kv(ffi::ThreadPool threads, Operand pool, Operand slots, Operand live, Operand values,
                      Operand first_layer, Operand first_head, Result out) {
  Selection selection;
  const std::string error = select(pool, slots, live, first_layer, first_head, values, selection);
  if (!error.empty()) return failed("import_kv: " + error);
  if (!is_in_place(pool, *out)) return failed("import_kv: pool must be aliased to the result");
  const char* source = data<const char>(values);
  char* target = data<char>(*out);
  return each_stretch(
      threads, PoolShape(pool), selection,
      [=](int64_t in_pool, int64_t in_values, int64_t bytes, int64_t) {
        copy_into_pool(target + in_pool, source + in_values, bytes);
      },
      [](int64_t, int64_t) {});
}

ffi::Future copy_blocks(ffi::ThreadPool threads, Operand pool, Operand sources, Operand targets, Operand live,
                        Result out) {
  const auto wrong = [](const std::string& what) { return failed("copy_blocks: " + what); };
  if (!is_pool(pool) || !is_in_place(pool, *out)) {
    return wrong("pool must have five dimensions, float32 or bfloat16, and be aliased to the result");
  }
  if (!is_int32(sources, 1) || !are_alike(sources, targets)) {
    return wrong("sources and targets must be int32 [n]");
  }
  if (!is_scalar(live)) return wrong("live must be an int32 scalar");
  const PoolShape shape(pool);
  const int64_t count = scalar(live);
  if (count < 0 || count > sources.dimensions()[0]) return wrong("live is out of range");
  const int32_t *from = data<const int32_t>(sources), *to = data<const int32_t>(targets);
  const auto outside = [&](int32_t block) { return block < 0 || block >= shape.blocks; };
  if (std::any_of(from, from + count, outside)) return wrong("sources names a block outside of the pool");
  if (std::any_of(to, to + count, outside)) return wrong("targets names a block outside of the pool");

  char* memory = data<char>(*out);
  const int64_t chunk = rows_per_task(shape.block), chunks = (count + chunk - 1) / chunk;
  return parallel_for(threads, threads_of(threads), shape.layers * chunks, [=](int64_t task) {
    char* layer = memory + task / chunks * shape.layer;
    const int64_t begin = task % chunks * chunk;
    for (int64_t i = begin; i < std::min(count, begin + chunk); ++i) {
      if (from[i] == to[i]) continue;
      std::memcpy(layer + to[i] * shape.block, layer + from[i] * shape.block, shape.block);
    }
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(hexserve_write_kv, Guarded<write_kv>::call,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // k_pool
                                  .Arg<ffi::AnyBuffer>()  // v_pool
                                  .Arg<ffi::AnyBuffer>()  // layer
                                  .Arg<ffi::AnyBuffer>()  // slots
                                  .Arg<ffi::AnyBuffer>()  // k
                                  .Arg<ffi::AnyBuffer>()  // v
                                  .Arg<ffi::AnyBuffer>()  // live
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(hexserve_export_kv, Guarded<export_kv>::call,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // pool
                                  .Arg<ffi::AnyBuffer>()  // slots
                                  .Arg<ffi::AnyBuffer>()  // live
                                  .Arg<ffi::AnyBuffer>()  // first_layer
                                  .Arg<ffi::AnyBuffer>()  // first_head
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(hexserve_import_kv, Guarded<import_kv>::call,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // pool
                                  .Arg<ffi::AnyBuffer>()  // slots
                                  .Arg<ffi::AnyBuffer>()  // live
                                  .Arg<ffi::AnyBuffer>()  // values
                                  .Arg<ffi::AnyBuffer>()  // first_layer
                                  .Arg<ffi::AnyBuffer>()  // first_head
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(hexserve_copy_blocks, Guarded<copy_blocks>::call,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // pool
                                  .Arg<ffi::AnyBuffer>()  // sources
                                  .Arg<ffi::AnyBuffer>()  // targets
                                  .Arg<ffi::AnyBuffer>()  // live
                                  .Ret<ffi::AnyBuffer>());

}  // namespace hexserve
