// The one inner loop for which there are tiles: compiled for the processor's, and for emulated ones.
// See isa.cc for what may be included here.

#ifdef __AMX_BF16__
#include "amx_registers.h"
#else
#include "amx_emulated.h"
#endif
// Above: the tiles. Below: what is made of them.
#include "amx_tiles.h"

namespace hexserve {
namespace HEXSERVE_ISA {

extern const MultiplyPanels<uint16_t> multiply_bf16;
extern const MultiplyPanels<uint16_t, int8_t> multiply_bf16_int8;
const MultiplyPanels<uint16_t> multiply_bf16 = multiply_by_tiles<uint16_t>;
const MultiplyPanels<uint16_t, int8_t> multiply_bf16_int8 = multiply_by_tiles<int8_t>;

}  // namespace HEXSERVE_ISA
}  // namespace hexserve
