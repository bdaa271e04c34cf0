#pragma once

namespace hexserve {
namespace HEXSERVE_ISA {

constexpr LinearTable kLinear = {};

}  // namespace HEXSERVE_ISA
}  // namespace hexserve
