// Meta kernels for operators that have none in LibTorch's C++ library (most are in its Python
// half). In a dry run, and only there, they run the operator on the CPU to find the result's size.
#pragma once

namespace fsdp::memory {

void install_missing_operators();  // once; changes nothing outside of dry runs

}  // namespace fsdp::memory
