#pragma once

namespace hexserve {
namespace HEXSERVE_ISA {

constexpr AttentionTable kAttention = {};

}  // namespace HEXSERVE_ISA
}  // namespace hexserve
