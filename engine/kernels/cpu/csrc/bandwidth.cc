// read_all(x) -> digest [64]: reads every byte of x once, as fast as memory gives them. The
// benchmarks measure by it what the kernels could reach.

#include "operands.h"
#include "parallel.h"

namespace hexserve {
namespace {

constexpr int64_t kParts = 64;  // several for each thread, so that none waits long for another
constexpr int64_t kWords = 16;  // read side by side: two cache lines

ffi::Future read_all(ffi::ThreadPool pool, Operand x, Result digest) {
  if (digest->element_type() != ffi::U32 || int64_t(digest->element_count()) != kParts) {
    return failed("read_all: digest must be uint32 [64]");
  }
  const uint64_t* words = data<const uint64_t>(x);
  uint32_t* out = data<uint32_t>(*digest);
  const int64_t rounds = int64_t(x.size_bytes()) / int64_t(sizeof(uint64_t)) / kWords;
  return parallel_for(pool, threads_of(pool), kParts, [=](int64_t part) {
    uint64_t sums[kWords] = {};
    const int64_t end = rounds * (part + 1) / kParts;
    for (int64_t round = rounds * part / kParts; round < end; ++round) {
      const uint64_t* line = words + round * kWords;
      __builtin_prefetch(line + 64 * kWords);
      for (int64_t i = 0; i < kWords; ++i) sums[i] += line[i];
    }
    uint64_t sum = 0;
    for (int64_t i = 0; i < kWords; ++i) sum += sums[i];
    out[part] = uint32_t(sum);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(hexserve_read_all, Guarded<read_all>::call,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

}  // namespace hexserve
