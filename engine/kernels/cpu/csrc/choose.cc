// Which instruction set's table runs.

#include <atomic>
#include <cstring>

#include "kernel_table.h"

namespace hexserve {

namespace avx2 {
extern const KernelTable table;
}
namespace avx512 {
extern const KernelTable table;
}
namespace avx512bf16 {
extern const KernelTable table;
}

namespace {

bool runs_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool runs_avx512() {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool runs_avx512bf16() { return runs_avx512() && __builtin_cpu_supports("avx512bf16"); }

struct Entry {
  const KernelTable* table;
  bool (*runs)();
};

constexpr Entry kEntries[] = {
    {&avx512bf16::table, runs_avx512bf16}, {&avx512::table, runs_avx512}, {&avx2::table, runs_avx2}};

std::atomic<const KernelTable*> chosen{nullptr};

// Null where none runs; nothing is called there.
const KernelTable* best() {
  for (const Entry& entry : kEntries) {
    if (entry.runs()) return entry.table;
  }
  return nullptr;
}

}  // namespace

const char* const* available() {
  static const char* names[4] = {};
  static const bool filled = [] {
    int count = 0;
    for (const Entry& entry : kEntries) {
      if (entry.runs()) names[count++] = entry.table->name;
    }
    return true;
  }();
  (void)filled;
  return names;
}

bool choose(const char* name) {
  for (const Entry& entry : kEntries) {
    if (std::strcmp(entry.table->name, name) == 0 && entry.runs()) {
      chosen.store(entry.table, std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

const KernelTable& kernels() {
  const KernelTable* table = chosen.load(std::memory_order_relaxed);
  return table != nullptr ? *table : *best();
}

}  // namespace hexserve
