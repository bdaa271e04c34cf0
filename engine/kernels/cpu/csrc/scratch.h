// Memory that a thread keeps for its tasks.

#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace hexserve {

class Scratch {
 public:
  // Room for a task that will `take` up to `bytes`; what was taken before is gone.
  void reset(int64_t bytes) {
    used_ = 0;
    if (bytes <= size_) return;
    memory_.reset();
    memory_.reset(static_cast<char*>(::operator new(bytes, kAlignment)));
    size_ = bytes;
  }

  template <typename T>
  T* take(int64_t count) {
    T* place = reinterpret_cast<T*>(memory_.get() + used_);
    used_ += bytes_of<T>(count);
    return place;
  }

  // What `take` uses for so many.
  template <typename T>
  static int64_t bytes_of(int64_t count) {
    return (count * int64_t(sizeof(T)) + kLine - 1) / kLine * kLine;
  }

 private:
  static constexpr int64_t kLine = 64;
  static constexpr std::align_val_t kAlignment{kLine};
  struct Delete {
    void operator()(char* memory) const { ::operator delete(memory, kAlignment); }
  };

  std::unique_ptr<char, Delete> memory_;
  int64_t size_ = 0, used_ = 0;
};

}  // namespace hexserve
