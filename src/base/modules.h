// Parts of the library that are loaded on demand: libfsdp_mpi.so and libfsdp_cuda.so. Both are next
// to the library itself, in the build folder and when installed.
#pragma once

#include <string>

#include "base/namespace.h"

namespace fsdp::base {

// The dlopen handle of "mpi" or "cuda", loaded once. Null if it wasn't built or can't be loaded;
// `why` then holds the reason.
void* find_library(const std::string& name, std::string* why = nullptr);
// The same, but throws instead of returning null.
void* require_library(const std::string& name);

// Registers the CUDA kernels of our operators, once.
void load_cuda_module();

}  // namespace fsdp::base
