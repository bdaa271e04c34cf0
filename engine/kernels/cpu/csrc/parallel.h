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

// Tasks lie in stretches, and are taken in order from the first of each. A thread begins with its
// own stretch and then helps with the others.
template <typename F>
class Job {
 public:
  Job(int64_t count, int64_t stretches, F task)
      : count_(count), stretches_(stretches), task_(std::move(task)), next_(new Counter[stretches]) {}

  ffi::Future future() const { return ffi::Future(promise_); }

  void work(int64_t thread) noexcept {
    int64_t done = 0;
    {
      FlushDenormals guard;
      for (int64_t i = 0; i < stretches_; ++i) done += walk((thread + i) % stretches_);
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
  struct alignas(64) Counter {
    std::atomic<int64_t> taken{0};
  };

  int64_t walk(int64_t stretch) noexcept {
    const int64_t begin = count_ * stretch / stretches_, end = count_ * (stretch + 1) / stretches_;
    for (int64_t done = 0;; ++done) {
      const int64_t index = begin + next_[stretch].taken.fetch_add(1, std::memory_order_relaxed);
      if (index >= end) return done;
      try {
        task_(index);
      } catch (const std::bad_alloc&) {  // all that a task can throw
        out_of_memory_.store(true, std::memory_order_relaxed);
      }
    }
  }

  const int64_t count_, stretches_;
  F task_;
  ffi::Promise promise_;
  std::atomic<bool> out_of_memory_{false};
  std::unique_ptr<Counter[]> next_;
  alignas(64) std::atomic<int64_t> done_{0};
};

// How many threads may work on one kernel, the caller among them.
inline int64_t threads_of(const ffi::ThreadPool& pool) {
  const int64_t most = std::max<int64_t>(1, pool.num_threads());
  const int64_t limit = thread_limit.load(std::memory_order_relaxed);
  return limit > 0 ? std::min(limit, most) : most;
}

// Runs task(0) ... task(count - 1), in any order, on up to `threads` threads. Of one stretch,
// threads take tasks in turn; of one for each, every thread reads memory in its order.
//
// `task` is copied; what it points at must live until the Future is available: XLA's buffers
// do. Anything else belongs in the task itself (by shared_ptr).
template <typename F>
ffi::Future parallel_for(ffi::ThreadPool& pool, int64_t threads, int64_t count, F task,
                         int64_t stretches = 1) {
  if (count <= 0) {
    ffi::Promise none;
    none.SetAvailable();
    return ffi::Future(none);
  }
  auto job = std::make_shared<Job<F>>(count, stretches, std::move(task));
  ffi::Future future = job->future();
  for (int64_t thread = 1; thread < std::min(threads, count); ++thread) {
    pool.Schedule([job, thread] { job->work(thread); });
  }
  job->work(0);
  return future;
}

}  // namespace hexserve
