// Families: what kind of work a kernel or an operator does, by its name.
#pragma once

#include <string_view>

namespace fsdp::observe {

enum class Family {
  kProducts,
  kAttention,
  kNorms,
  kElementwise,
  kLoss,
  kOptimizer,
  kCopies,
  kOther,
  kCommunication,
  kData,  // waiting for it; not of a kernel
};
inline constexpr int kFamilies = 10;
const char* family_name(Family family);

// `name`: of a CUDA kernel ("nvjet_hsh_128x256_64x4_…") or an operator ("aten::mm"). kOther:
// unknown.
Family family_of(std::string_view name);

}  // namespace fsdp::observe
