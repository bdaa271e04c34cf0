// rms_norm(x [rows, width], weight [layers, width] or [0], layer, live; eps) -> y [rows, width]

#include "kernel_table.h"
#include "operands.h"
#include "parallel.h"

namespace hexserve {
namespace {

constexpr int64_t kElementsPerTask = 16384;

template <typename T, typename W>
ffi::Future normalize(ffi::ThreadPool& pool, RmsNorm<T, W> row, const Operand& x, const Operand& weight,
                      int64_t layer, int64_t live, Operand& y, float eps) {
  const int64_t width = x.dimensions()[1];
  const T* in = data<const T>(x);
  const W* scale = is_absent(weight) ? nullptr : data<const W>(weight) + layer * width;
  T* out = data<T>(y);
  const int64_t rows_per_task = std::max<int64_t>(1, kElementsPerTask / width);
  const int64_t tasks = (live + rows_per_task - 1) / rows_per_task;
  return parallel_for(pool, threads_of(pool), tasks, [=](int64_t task) {
    const int64_t end = std::min(live, (task + 1) * rows_per_task);
    for (int64_t i = task * rows_per_task; i < end; ++i) {
      row(in + i * width, scale, out + i * width, width, eps);
    }
  });
}

ffi::Future rms_norm(ffi::ThreadPool pool, Operand x, Operand weight, Operand layer, Operand live, Result y,
                     float eps) {
  if (!is_float(x, 2) || !are_alike(x, *y)) {
    return failed("rms_norm: x must be float32 or bfloat16 [rows, width], and y like it");
  }
  const bool by_f32 = weight.element_type() == ffi::F32;
  if (!is_absent(weight) && (weight.dimensions().size() != 2 || weight.dimensions()[1] != x.dimensions()[1] ||
                             (!by_f32 && weight.element_type() != x.element_type()))) {
    return failed("rms_norm: weight must be [layers, width], in float32 or the dtype of x");
  }
  if (!is_scalar(layer) || !is_scalar(live)) {
    return failed("rms_norm: layer and live must be int32 scalars");
  }
  const int64_t index = scalar(layer), rows = scalar(live);
  const bool has_layer = is_absent(weight) || (index >= 0 && index < weight.dimensions()[0]);
  if (!has_layer || rows < 0 || rows > x.dimensions()[0]) {
    return failed("rms_norm: layer or live is out of range");
  }
  const NormTable& table = kernels().norm;
  if (x.element_type() == ffi::F32) return normalize(pool, table.f32, x, weight, index, rows, *y, eps);
  if (by_f32) return normalize(pool, table.bf16_by_f32, x, weight, index, rows, *y, eps);
  return normalize(pool, table.bf16, x, weight, index, rows, *y, eps);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(hexserve_rms_norm, Guarded<rms_norm>::call,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("eps"));

}  // namespace hexserve
