#pragma once

#include "kernel_table.h"

namespace hexserve {

// Whether the table's matmuls of bfloat16, by weights of bfloat16 and of int8, compute a small
// product as they should: a processor, or what stands between it and us, may not do what it says.
bool multiplies_right(const KernelTable& table);

}  // namespace hexserve
