// Parts of the library that are loaded when they are needed: libfsdp_mpi.so, libfsdp_cuda.so. They
// lie beside the library itself, in the build folder and when installed.
#pragma once

#include <string>

namespace fsdp {

// "mpi" or "cuda": the library's handle (dlopen's). Loaded once; null where it was not built or
// cannot be loaded, and then `why` says so.
void* find_library(const std::string& name, std::string* why = nullptr);
// The same, but throws where there is none.
void* require_library(const std::string& name);

// Registers the CUDA kernels of our operators, if that has not happened yet.
void load_cuda_module();

}  // namespace fsdp
