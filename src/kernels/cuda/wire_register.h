// kernels/wire.h for CUDA tensors, for the table of update_register.cpp.
#pragma once

#include "kernels/wire.h"

namespace fsdp::kernels::on_gpu {

void encode_wire(const at::Tensor& values, const at::Tensor& bytes, int64_t messages, Wire wire);
void sum_wire(const at::Tensor& bytes, const at::Tensor& sums, const WireSum& what, Wire wire);

}  // namespace fsdp::kernels::on_gpu
