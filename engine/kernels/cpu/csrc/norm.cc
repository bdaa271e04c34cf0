// rms_norm(x [rows, width], weight [layers, width], layer, live) -> y [rows, width]

#include "kernel_table.h"
#include "operands.h"
#include "parallel.h"

namespace hexserve {
namespace {

constexpr int64_t kElementsPerTask = 16384;

template <typename T>
ffi::Future normalize(ffi::ThreadPool& pool, RmsNorm<T> row, const Operand& x, const Operand& weight,
                      int64_t layer, int64_t live, Operand& y, float eps) {
  const int64_t width = x.dimensions()[1];
  const T* in = data<const T>(x);
  const T* scale = data<const T>(weight) + layer * width;
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

ffi::Future rms_norm(ffi::ThreadPool pool, Operand x, Operand weight, Operand layer, Operand live,
                     Result y, float eps) {
  if (x.dimensions().size() != 2 || weight.dimensions().size() != 2 ||
      x.dimensions()[1] != weight.dimensions()[1] || x.element_type() != weight.element_type() ||
      y->element_count() != x.element_count() || y->element_type() != x.element_type()) {
    return failed("rms_norm: x [rows, width], weight [layers, width] and y do not fit together");
  }
  if (!is_scalar(layer) || !is_scalar(live)) {
    return failed("rms_norm: layer and live must be int32 scalars");
  }
  const int64_t index = scalar(layer), rows = scalar(live);
  if (index < 0 || index >= weight.dimensions()[0] || rows < 0 || rows > x.dimensions()[0]) {
    return failed("rms_norm: layer or live is out of range");
  }
  const NormTable& table = kernels().norm;
  switch (x.element_type()) {
    case ffi::F32:
      return normalize<float>(pool, table.f32, x, weight, index, rows, *y, eps);
    case ffi::BF16:
      return normalize<uint16_t>(pool, table.bf16, x, weight, index, rows, *y, eps);
    default:
      return failed("rms_norm: x must be float32 or bfloat16");
  }
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
