#pragma once

namespace hexserve {

struct AttentionTable {};

}  // namespace hexserve
