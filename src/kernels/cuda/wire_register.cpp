#include "kernels/cuda/wire_register.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include "fsdp/error.h"
#include "kernels/cuda/wire.h"

namespace fsdp::kernels::on_gpu {
namespace {

cuda::Dtype wire_dtype(const at::Tensor& tensor) {
  if (tensor.scalar_type() == at::ScalarType::BFloat16) return cuda::Dtype::kBFloat16;
  return tensor.scalar_type() == at::ScalarType::Half ? cuda::Dtype::kFloat16
                                                      : cuda::Dtype::kFloat32;
}

cuda::WireMessages messages_of(int64_t numel, Wire wire) {
  const cuda::Code code = wire == Wire::BF16  ? cuda::Code::kBFloat16
                          : wire == Wire::FP8 ? cuda::Code::kFp8
                                              : cuda::Code::kInt8;
  return {code, numel, wire_bytes(numel, wire)};
}

void require_aligned(const at::Tensor& values, const at::Tensor& bytes) {
  for (const at::Tensor& tensor : {values, bytes})
    if (reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 != 0)
      throw Error("a message between ranks isn't aligned to 16 bytes.", "see kernels/wire.h.");
}

}  // namespace

void encode_wire(const at::Tensor& values, const at::Tensor& bytes, int64_t messages, Wire wire) {
  require_aligned(values, bytes);
  const c10::cuda::CUDAGuard guard(values.device());
  cuda::encode_wire(values.const_data_ptr(), wire_dtype(values), bytes.mutable_data_ptr<uint8_t>(),
                    messages, messages_of(values.numel() / messages, wire),
                    at::cuda::getCurrentCUDAStream().stream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void sum_wire(const at::Tensor& bytes, const at::Tensor& sums, const WireSum& what, Wire wire) {
  require_aligned(sums, bytes);
  const c10::cuda::CUDAGuard guard(sums.device());
  cuda::sum_wire(bytes.const_data_ptr<uint8_t>(), sums.mutable_data_ptr(), wire_dtype(sums),
                 what.groups, what.messages, what.divisor,
                 messages_of(sums.numel() / what.groups, wire),
                 at::cuda::getCurrentCUDAStream().stream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace fsdp::kernels::on_gpu
