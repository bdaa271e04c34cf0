// Whether this process may use the processor's tiles.

#pragma once

namespace hexserve {

// The processor has AMX for bfloat16, the system saves its state, and lets this process use it:
// asked for once, at the first call.
bool may_use_amx();

}  // namespace hexserve
