#include "amx_support.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#include "amx_config.h"

namespace hexserve {
namespace {

constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM, which older headers lack
constexpr long kTileData = 18;               // the state's number in XCR0

bool processor_has_tiles() {
  constexpr unsigned kTile = 1u << 24, kBf16 = 1u << 22;
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kTile) == 0 || (d & kBf16) == 0) return false;
  // Palette 1: as large as the loop takes them to be.
  if (!__get_cpuid_count(0x1d, 1, &a, &b, &c, &d)) return false;
  return (b & 0xffff) >= kTileRowBytes && b >> 16 >= kTiles && (c & 0xffff) >= kTileRows;
}

bool system_saves_tiles() {
  constexpr unsigned kOsXsave = 1u << 27;
  constexpr uint64_t kTileConfigAndData = uint64_t(3) << 17;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & kOsXsave) == 0) return false;
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  const uint64_t xcr0 = uint64_t(high) << 32 | low;
  return (xcr0 & kTileConfigAndData) == kTileConfigAndData;
}

// Linux (5.16) kills a process that uses tiles without having asked; an older one refuses.
bool system_permits_tiles() { return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0; }

}  // namespace

bool may_use_amx() {
  static const bool may = processor_has_tiles() && system_saves_tiles() && system_permits_tiles();
  return may;
}

}  // namespace hexserve
