// Stands in for the part of LibTorch's CUDA half that register.cpp and update_register.cpp of
// src/kernels/cuda use when their kernels run on the CPU: one device, one stream, no errors.
#pragma once

#include <ATen/core/Tensor.h>
#include <cuda_runtime_api.h>
#include <torch/library.h>

namespace simulate {
struct Stream {
  cudaStream_t stream() const { return nullptr; }
};
}  // namespace simulate

namespace c10::cuda {
struct CUDAGuard {
  explicit CUDAGuard(c10::Device) {}
};
inline simulate::Stream getCurrentCUDAStream(c10::DeviceIndex = 0) {
  return {};
}
}  // namespace c10::cuda

namespace at::cuda {
using c10::cuda::getCurrentCUDAStream;
}  // namespace at::cuda

#define C10_CUDA_KERNEL_LAUNCH_CHECK()

// What translate.py substitutes for their registrations; see simulated.cpp.
namespace fsdp::kernels {
struct CudaUpdates;
void register_simulated(torch::Library& m);
void set_simulated_updates(const CudaUpdates* table);
}  // namespace fsdp::kernels
