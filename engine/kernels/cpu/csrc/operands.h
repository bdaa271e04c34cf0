// Checked access to the buffers of a call. A wrong call is an error that names the operand; it
// never reads or writes outside of a buffer.

#pragma once

#include <algorithm>
#include <cstdint>
#include <new>
#include <string>
#include <utility>

#include "ffi.h"

namespace hexserve {

using Operand = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

inline ffi::Error invalid(const std::string& what) { return ffi::Error::InvalidArgument(what); }

// A handler returns a Future; an error is one that is ready.
inline ffi::Future failed(const std::string& what) {
  ffi::Promise promise;
  promise.SetError(invalid(what));
  return ffi::Future(promise);
}

// `handler` as XLA may call it: no exception gets out.
template <auto handler>
struct Guarded;

template <typename... Operands, ffi::Future (*handler)(Operands...)>
struct Guarded<handler> {
  static ffi::Future call(Operands... operands) {
    try {
      return handler(std::move(operands)...);
    } catch (const std::bad_alloc&) {
      ffi::Promise promise;
      promise.SetError(ffi::Error(ffi::ErrorCode::kResourceExhausted, "no memory for a kernel's call"));
      return ffi::Future(promise);
    }
  }
};

template <typename T>
T* data(const Operand& buffer) {
  return static_cast<T*>(buffer.untyped_data());
}

// The run-time value of an int32 scalar.
inline int64_t scalar(const Operand& buffer) { return *data<const int32_t>(buffer); }

inline bool is_scalar(const Operand& buffer) {
  return buffer.element_type() == ffi::S32 && buffer.element_count() == 1;
}

inline bool is_int32(const Operand& buffer, size_t rank) {
  return buffer.element_type() == ffi::S32 && buffer.dimensions().size() == rank;
}

inline bool is_float(const Operand& buffer, size_t rank) {
  const bool fits = buffer.element_type() == ffi::F32 || buffer.element_type() == ffi::BF16;
  return fits && buffer.dimensions().size() == rank;
}

// An optional operand that is not there has no elements.
inline bool is_absent(const Operand& optional) { return optional.element_count() == 0; }

// Same element type and dimensions.
inline bool are_alike(const Operand& a, const Operand& b) {
  const auto x = a.dimensions(), y = b.dimensions();
  return a.element_type() == b.element_type() && std::equal(x.begin(), x.end(), y.begin(), y.end());
}

}  // namespace hexserve
