// rotate(q [T, heads, head_dim], k [T, kv_heads, head_dim], angles [positions, width],
//        positions [T], live) -> q, k

#include "kernel_table.h"
#include "operands.h"
#include "parallel.h"

namespace hexserve {
namespace {

constexpr int64_t kElementsPerTask = 16384;

template <typename T>
Rotate<T> rotation();
template <>
Rotate<float> rotation() {
  return kernels().rotate.f32;
}
template <>
Rotate<uint16_t> rotation() {
  return kernels().rotate.bf16;
}

template <typename T>
ffi::Future rotate_all(ffi::ThreadPool& pool, const Operand& q, const Operand& k, const Operand& angles,
                       const Operand& positions, int64_t live, Operand& q_out, Operand& k_out) {
  const int64_t heads = q.dimensions()[1], kv_heads = k.dimensions()[1], head_dim = q.dimensions()[2];
  const int64_t width = angles.dimensions()[1];
  const int64_t q_width = heads * head_dim, k_width = kv_heads * head_dim;
  const T *q_in = data<const T>(q), *k_in = data<const T>(k);
  T *q_to = data<T>(q_out), *k_to = data<T>(k_out);
  const float* table = data<const float>(angles);
  const int32_t* position = data<const int32_t>(positions);
  const Rotate<T> rotate = rotation<T>();
  const int64_t elements = std::max<int64_t>(1, q_width + k_width);
  const int64_t tokens_per_task = std::max<int64_t>(1, kElementsPerTask / elements);
  const int64_t tasks = (live + tokens_per_task - 1) / tokens_per_task;
  return parallel_for(pool, threads_of(pool), tasks, [=](int64_t task) {
    const int64_t end = std::min(live, (task + 1) * tokens_per_task);
    for (int64_t t = task * tokens_per_task; t < end; ++t) {
      const float* row = table + position[t] * width;
      rotate(q_in + t * q_width, row, width, q_to + t * q_width, heads, head_dim);
      rotate(k_in + t * k_width, row, width, k_to + t * k_width, kv_heads, head_dim);
    }
  });
}

ffi::Future rotate(ffi::ThreadPool pool, Operand q, Operand k, Operand angles, Operand positions,
                   Operand live, Result q_out, Result k_out) {
  if (!is_float(q, 3) || !are_alike(q, *q_out)) {
    return failed("rotate: q [T, heads, head_dim] must be float32 or bfloat16, and its result like it");
  }
  const int64_t tokens = q.dimensions()[0], head_dim = q.dimensions()[2];
  if (!is_float(k, 3) || !are_alike(k, *k_out) || k.element_type() != q.element_type() ||
      k.dimensions()[0] != tokens || k.dimensions()[2] != head_dim) {
    return failed("rotate: k must have the tokens, head_dim and type of q, and its result be like it");
  }
  if (angles.element_type() != ffi::F32 || angles.dimensions().size() != 2 ||
      angles.dimensions()[1] > head_dim || angles.dimensions()[1] % 2 != 0) {
    return failed("rotate: angles must be float32 [positions, width], width even and at most head_dim");
  }
  if (!is_int32(positions, 1) || positions.dimensions()[0] != tokens) {
    return failed("rotate: positions must be int32 [T]");
  }
  if (!is_scalar(live)) return failed("rotate: live must be an int32 scalar");
  const int64_t count = scalar(live);
  if (count < 0 || count > tokens) return failed("rotate: live is out of range");
  const int32_t* position = data<const int32_t>(positions);
  const int64_t known = angles.dimensions()[0];
  if (std::any_of(position, position + count, [=](int32_t p) { return p < 0 || p >= known; })) {
    return failed("rotate: positions leads out of angles");
  }
  const auto chosen = q.element_type() == ffi::F32 ? rotate_all<float> : rotate_all<uint16_t>;
  return chosen(pool, q, k, angles, positions, count, *q_out, *k_out);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(hexserve_rotate, Guarded<rotate>::call,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // q
                                  .Arg<ffi::AnyBuffer>()  // k
                                  .Arg<ffi::AnyBuffer>()  // angles
                                  .Arg<ffi::AnyBuffer>()  // positions
                                  .Arg<ffi::AnyBuffer>()  // live
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

}  // namespace hexserve
