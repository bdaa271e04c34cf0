// Splits a kernel's work over XLA's own thread pool.
//
// A kernel returns the Future of `parallel_for`: the calling thread works through the tasks
// together with the pool's, and whoever ends last resumes the program. No thread waits, so no
// thread of the pool is ever blocked, and a program makes progress even when the pool is busy.

#pragma once

#include <xmmintrin.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>

#include "ffi.h"

namespace hexserve {

// Most threads that work on one kernel; 0 is as many as the pool has.
inline std::atomic<int64_t> thread_limit{0};

// Threads differ in how they treat denormals; the bits of a result may not.
class FlushDenormals {
 public:
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | kFlushToZero | kDenormalsAreZero); }
  ~FlushDenormals() { _mm_setcsr(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  static constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  unsigned saved_;
};

template <typename F>
class Job {
 public:
  Job(int64_t count, F task) : count_(count), task_(std::move(task)) {}

  ffi::Future future() const { return ffi::Future(promise_); }

  void work() noexcept {
    int64_t done = 0;
    {
      FlushDenormals guard;
      for (;;) {
        const int64_t index = next_.fetch_add(1, std::memory_order_relaxed);
        if (index >= count_) break;
        try {
          task_(index);
        } catch (const std::bad_alloc&) {  // all that a task can throw
          out_of_memory_.store(true, std::memory_order_relaxed);
        }
        ++done;
      }
    }
    // A thread that finds nothing left touches no buffer: they may be gone by then.
    if (done == 0 || done_.fetch_add(done, std::memory_order_acq_rel) + done < count_) return;
    if (out_of_memory_.load(std::memory_order_relaxed)) {
      promise_.SetError(ffi::Error(ffi::ErrorCode::kResourceExhausted, "no memory for a kernel's scratch"));
    } else {
      promise_.SetAvailable();
    }
  }

 private:
  const int64_t count_;
  F task_;
  ffi::Promise promise_;
  std::atomic<bool> out_of_memory_{false};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int64_t> done_{0};
};

// How many threads may work on one kernel, the caller among them.
inline int64_t threads_of(const ffi::ThreadPool& pool) {
  const int64_t most = std::max<int64_t>(1, pool.num_threads());
  const int64_t limit = thread_limit.load(std::memory_order_relaxed);
  return limit > 0 ? std::min(limit, most) : most;
}

// Runs task(0) ... task(count - 1), in any order, on up to `threads` threads.
//
// `task` is copied; what it points at must live until the Future is available: XLA's buffers
// do. Anything else belongs in the task itself (by shared_ptr).
template <typename F>
ffi::Future parallel_for(ffi::ThreadPool& pool, int64_t threads, int64_t count, F task) {
  if (count <= 0) {
    ffi::Promise none;
    none.SetAvailable();
    return ffi::Future(none);
  }
  auto job = std::make_shared<Job<F>>(count, std::move(task));
  ffi::Future future = job->future();
  for (int64_t helpers = std::min(threads, count) - 1; helpers > 0; --helpers) {
    pool.Schedule([job] { job->work(); });
  }
  job->work();
  return future;
}

}  // namespace hexserve
