// Operators that the meta device lacks in LibTorch's C++ library (its Python half has most of
// them). In a dry run, and only there, their results are sized by trying them on the CPU.
#pragma once

namespace fsdp::memory {

void install_missing_operators();  // once; nothing changes outside of dry runs

}  // namespace fsdp::memory
