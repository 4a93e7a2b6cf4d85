// CudaUpdates: the parts of update.h, split.h and wire.h that libfsdp_cuda.so implements. The
// module registers its table when it is loaded; without it (or on another device) LibTorch's
// operators do the work.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>

#include "kernels/update.h"
#include "kernels/wire.h"

namespace fsdp::kernels {

struct CudaUpdates {
  // `numbers` null: the numbers are in `steps`, one for all or one per tensor; otherwise `steps`
  // has one entry. Masters must be float32, whole or split (ours() in update.cpp).
  void (*adamw)(std::span<const AdamWTensors> tensors, std::span<const AdamWStep> steps,
                const DeviceNumbers* numbers, const at::Tensor& factor);
  void (*sgd)(std::span<const SGDTensors> tensors, std::span<const SGDStep> steps,
              const DeviceNumbers* numbers, const at::Tensor& factor);
  // float32, bfloat16 and float16.
  at::Tensor (*sum_of_squares)(std::span<const at::Tensor> tensors);
  Clipping (*clip)(std::span<const at::Tensor> tensors, double max_norm);
  Clipping (*clip_factor)(const at::Tensor& total, double max_norm);
  void (*split_float)(const at::Tensor& whole, const at::Tensor& high, const at::Tensor& rest);
  at::Tensor (*join_float)(const at::Tensor& high, const at::Tensor& rest);
  void (*encode_wire)(const at::Tensor& values, const at::Tensor& bytes, int64_t messages,
                      Wire wire);
  void (*sum_wire)(const at::Tensor& bytes, const at::Tensor& sums, const WireSum& what, Wire wire);
};

void set_cuda_updates(const CudaUpdates* table);  // called by the module
// Loads the module at the first GPU tensor; null for another device, or if there is no module.
const CudaUpdates* cuda_updates(at::Device device);

}  // namespace fsdp::kernels
