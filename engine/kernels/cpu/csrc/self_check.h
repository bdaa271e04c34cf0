#pragma once

#include "kernel_table.h"

namespace hexserve {

// Whether the table's matmul of bfloat16 computes a small product as it should: a processor, or
// what stands between it and us, may not do what it says it does.
bool multiplies_right(const KernelTable& table);

}  // namespace hexserve
