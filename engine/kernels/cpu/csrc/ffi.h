// XLA's FFI, as the kernels name it.

#pragma once

#include "xla/ffi/api/ffi.h"

namespace hexserve {

namespace ffi = xla::ffi;

}  // namespace hexserve
