// One instruction set's inner loops: compiled once for each, with its flags and its name in
// HEXSERVE_ISA. Only intrinsics and C headers here: an inline function of the standard library
// compiled with these flags could be linked into code that runs on any processor.

#include "kernel_table.h"

#if defined(__AVX512F__)
#include "vec_avx512.h"
#else
#include "vec_avx2.h"
#endif

#include "prefetch.h"
#include "vec_ints.h"
#include "vec_math.h"
#include "vec_steps.h"
// Above: the vectors. Below: what is made of them.
#include "attention_tiles.h"
#include "convert_tiles.h"
#include "expert_tiles.h"
#include "linear_tiles.h"
#include "noise_tiles.h"
#include "norm_tiles.h"
#include "rotate_tiles.h"
#include "sample_tiles.h"

#define HEXSERVE_STRING_(x) #x
#define HEXSERVE_STRING(x) HEXSERVE_STRING_(x)

namespace hexserve {
namespace HEXSERVE_ISA {

extern const KernelTable table;
const KernelTable table = {
    HEXSERVE_STRING(HEXSERVE_ISA), kNorm, kLinear, kExperts, kAttention, kRotate, kConvert, kSample,
};

}  // namespace HEXSERVE_ISA
}  // namespace hexserve
