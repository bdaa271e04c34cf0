// Asks for a line of memory before it is read. Included by one instruction set's file alone.
//
// To GCC a function that only prefetches does nothing: calls of it vanish, and the loops around them.
// So it is not told what these instructions do; tests/engine/test_isa_units.py looks for them.

#pragma once

#include <cstdint>

namespace hexserve {
namespace HEXSERVE_ISA {

constexpr int64_t kLine = 64;  // bytes

static inline void prefetch(const void* p) { asm volatile("prefetcht0 %a0" : : "p"(p)); }
static inline void prefetch_l2(const void* p) { asm volatile("prefetcht1 %a0" : : "p"(p)); }

}  // namespace HEXSERVE_ISA
}  // namespace hexserve
