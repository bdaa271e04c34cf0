// Which instruction set's table runs.

#include <atomic>
#include <cstring>

#include "amx_support.h"
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

// AMX has a matmul alone; amx.cc has no table.
#ifdef HEXSERVE_HAS_AMX
namespace amx {
extern const MultiplyPanels<uint16_t> multiply_bf16;
extern const MultiplyPanels<uint16_t, int8_t> multiply_bf16_int8;
}  // namespace amx
#endif
namespace amx_emulated {
extern const MultiplyPanels<uint16_t> multiply_bf16;
extern const MultiplyPanels<uint16_t, int8_t> multiply_bf16_int8;
}  // namespace amx_emulated

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

constexpr Entry kVectors[] = {
    {&avx512bf16::table, runs_avx512bf16}, {&avx512::table, runs_avx512}, {&avx2::table, runs_avx2}};

// Null where none runs; nothing is called there.
const KernelTable* best_of_vectors() {
  for (const Entry& entry : kVectors) {
    if (entry.runs()) return entry.table;
  }
  return nullptr;
}

KernelTable with_tiles(const char* name, const KernelTable& vectors, MultiplyPanels<uint16_t> multiply_bf16,
                       MultiplyPanels<uint16_t, int8_t> multiply_bf16_int8) {
  KernelTable table = vectors;
  table.name = name;
  table.linear.multiply_bf16 = multiply_bf16;
  table.linear.multiply_bf16_int8 = multiply_bf16_int8;
  return table;
}

// Null where there is no AMX.
const KernelTable* amx_table() {
#ifdef HEXSERVE_HAS_AMX
  if (!runs_avx512bf16() || !may_use_amx()) return nullptr;
  static const KernelTable table =
      with_tiles("amx", avx512bf16::table, amx::multiply_bf16, amx::multiply_bf16_int8);
  return &table;
#else
  return nullptr;
#endif
}

// For tests: slow, so not among the available, but to be had by name wherever any table runs.
const KernelTable* emulated_table() {
  const KernelTable* vectors = best_of_vectors();
  if (vectors == nullptr) return nullptr;
  static const KernelTable table =
      with_tiles("amx_emulated", *vectors, amx_emulated::multiply_bf16, amx_emulated::multiply_bf16_int8);
  return &table;
}

std::atomic<const KernelTable*> chosen{nullptr};

}  // namespace

const char* const* available() {
  static const char* names[5] = {};
  static const bool filled = [] {
    int count = 0;
    if (const KernelTable* amx = amx_table()) names[count++] = amx->name;
    for (const Entry& entry : kVectors) {
      if (entry.runs()) names[count++] = entry.table->name;
    }
    return true;
  }();
  (void)filled;
  return names;
}

const KernelTable* find(const char* name) {
  const auto is_named = [&](const KernelTable* table) {
    return table != nullptr && std::strcmp(table->name, name) == 0;
  };
  for (const Entry& entry : kVectors) {
    if (is_named(entry.table)) return entry.runs() ? entry.table : nullptr;
  }
  if (is_named(amx_table())) return amx_table();
  return is_named(emulated_table()) ? emulated_table() : nullptr;
}

void choose(const KernelTable& table) { chosen.store(&table, std::memory_order_relaxed); }

const KernelTable& kernels() {
  const KernelTable* table = chosen.load(std::memory_order_relaxed);
  return table != nullptr ? *table : *best_of_vectors();
}

}  // namespace hexserve
