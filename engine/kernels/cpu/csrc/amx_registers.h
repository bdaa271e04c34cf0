// The tile registers of the processor. Included by amx.cc where AMX is.
//
// Not by the intrinsics: GCC 12's do not say that they read memory, so that what was written just
// before may be left out, and they want tile numbers as literals, which a template's are not.

#pragma once

#include "amx_config.h"

namespace hexserve {
namespace HEXSERVE_ISA {

// A thread's tiles, from the first `configure` to the end of this object. They are the thread's,
// so it may have only one; left in use they would slow each switch of the thread.
class Tiles {
 public:
  Tiles() = default;
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  // All tiles become 0.
  void configure(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }

  // Rows lie `stride` bytes apart.
  template <int tile>
  void load(const void* rows, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(tile) : "memory");
  }
  template <int tile>
  void store(void* rows, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(stride), "i"(tile) : "memory");
  }

  // sum += x weights, of pairs of bfloat16 (TDPBF16PS).
  template <int sum, int x, int weights>
  void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(x), "i"(weights));
  }
};

}  // namespace HEXSERVE_ISA
}  // namespace hexserve
