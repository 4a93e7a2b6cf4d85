// A workaround for NVPL BLAS, which LibTorch's aarch64 wheel contains.
//
// On a Neoverse V1 or V2 whose virtual machine hides SVE, NVPL picks SVE kernels from the CPU's
// part number and loops forever in the first matrix product. NVPL_BLAS_DEBUG_CPU_TYPE=1 makes it
// use kernels without SVE. NVPL reads the variable at its first call, so libfsdp sets it when it is
// loaded, unless the user has set it.
#pragma once

#include <string_view>

#include "base/namespace.h"

namespace fsdp::base {

inline constexpr const char* kNvplVariable = "NVPL_BLAS_DEBUG_CPU_TYPE";

// True if the text of /proc/cpuinfo describes a Neoverse V1 or V2 (part 0xd40 or 0xd4f) without the
// feature "sve".
bool hides_sve(std::string_view cpuinfo);

// hides_sve of this machine. Always false on other architectures.
bool this_machine_hides_sve();

// Whether libfsdp set the variable when it was loaded.
bool nvpl_variable_was_set_by_us();

}  // namespace fsdp::base
