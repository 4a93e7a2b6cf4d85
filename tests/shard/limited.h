// The model that limited_program trains: linears, each a unit.
#pragma once

#include <cstdint>

namespace fsdp::testing {

constexpr int64_t kLimitedWidth = 640;
constexpr int64_t kLimitedLayers = 16;
constexpr int64_t kLimitedParameters = kLimitedLayers * (kLimitedWidth + 1) * kLimitedWidth;

}  // namespace fsdp::testing
