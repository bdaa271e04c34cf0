// The inner loops, once for each instruction set: `isa.cc` is compiled for each of them and
// fills one table; the handlers call through the table that `choose` picked at start.
//
// What an inner loop computes for one row depends on that row alone, in the same order of the
// same instructions, whatever other rows are computed beside it.

#pragma once

#include <cstdint>

#include "attention_table.h"
#include "convert_table.h"
#include "expert_table.h"
#include "linear_table.h"
#include "norm_table.h"
#include "rotate_table.h"
#include "sample_table.h"

namespace hexserve {

struct KernelTable {
  const char* name;
  NormTable norm;
  LinearTable linear;
  ExpertTable experts;
  AttentionTable attention;
  RotateTable rotate;
  ConvertTable convert;
  SampleTable sample;
};

// The chosen table. Until `choose` is called, the best that this processor runs, but for AMX, which
// is to be checked first (self_check.h).
const KernelTable& kernels();

void choose(const KernelTable& table);

// A table by name; null if this processor does not run it or there is no such name.
const KernelTable* find(const char* name);

// Names of the tables to choose from on this processor, best first; ends with nullptr.
const char* const* available();

}  // namespace hexserve
