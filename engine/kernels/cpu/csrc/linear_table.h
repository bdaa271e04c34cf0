#pragma once

namespace hexserve {

struct LinearTable {};

}  // namespace hexserve
