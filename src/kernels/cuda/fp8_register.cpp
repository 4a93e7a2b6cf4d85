// The passes of kernels/fp8.h for CUDA tensors. As register.cpp: nothing waits, and memory comes
// from LibTorch's allocator.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <optional>
#include <tuple>

#include "kernels/cuda/fp8.h"
#include "kernels/cuda/fp8_operators.h"
#include "kernels/fp8.h"

namespace fsdp::kernels {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

cuda::Fp8Matrix matrix_of(const Tensor& x, const fp8::Matrix& size) {
  const auto type = x.scalar_type();
  return {.data = x.const_data_ptr(),
          .rows = size.rows,
          .columns = size.columns,
          .dtype = type == at::kFloat      ? cuda::Dtype::kFloat32
                   : type == at::kBFloat16 ? cuda::Dtype::kBFloat16
                                           : cuda::Dtype::kFloat16};
}

// At a multiple of 16 bytes.
Tensor aligned(const Tensor& x) {
  return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0 ? x : x.clone();
}

template <class Launch>
void on_stream_of(const Tensor& tensor, Launch launch) {
  const c10::cuda::CUDAGuard guard(tensor.device());
  launch(c10::cuda::getCurrentCUDAStream(tensor.device().index()).stream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

float* floats(const Tensor& tensor) {
  return tensor.numel() > 0 ? tensor.mutable_data_ptr<float>() : nullptr;
}

}  // namespace

std::tuple<Tensor, Tensor> fp8_amax(const Tensor& given, bool rowwise, bool rows, bool columns) {
  const fp8::Matrix size = fp8::check_amax(given);
  const Tensor x = aligned(given);
  const int64_t row_count = rowwise ? (rows ? size.rows : 0) : 1;
  const int64_t column_count = rowwise && columns ? size.columns : 0;
  const Tensor both = at::empty({row_count + column_count}, x.options().dtype(at::kFloat));
  const Tensor of_rows = both.narrow(0, 0, row_count),
               of_columns = both.narrow(0, row_count, column_count);
  on_stream_of(x, [&](cudaStream_t stream) {
    cuda::fp8_amax(matrix_of(x, size), {floats(of_rows), floats(of_columns), rowwise}, stream);
  });
  return {of_rows, of_columns};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> fp8_cast(const Tensor& given, const Optional& row_amax,
                                                    const Optional& column_amax, bool e5m2) {
  const fp8::Matrix size = fp8::check_cast(given, row_amax, column_amax);
  const Tensor x = aligned(given);
  const auto bytes = x.options().dtype(e5m2 ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn);
  const auto made = [&](const Optional& amax, int64_t rows, int64_t columns) {
    return amax ? at::empty({rows, columns}, bytes) : at::empty({0}, bytes);
  };
  const auto factors_for = [&](const Optional& amax) {
    return at::empty({amax ? amax->numel() : 0}, x.options().dtype(at::kFloat));
  };
  const Tensor rows = made(row_amax, size.rows, size.columns), row_factors = factors_for(row_amax);
  const Tensor columns = made(column_amax, size.columns, size.rows),
               column_factors = factors_for(column_amax);
  const auto copy_to = [&](const Optional& amax, const Tensor& data, const Tensor& factors) {
    if (!amax) return cuda::Fp8Copy{};
    return cuda::Fp8Copy{amax->const_data_ptr<float>(),
                         static_cast<uint8_t*>(data.mutable_data_ptr()), floats(factors)};
  };
  const bool rowwise =
      (row_amax && row_amax->numel() > 1) || (column_amax && column_amax->numel() > 1);
  on_stream_of(x, [&](cudaStream_t stream) {
    cuda::fp8_cast(matrix_of(x, size), copy_to(row_amax, rows, row_factors),
                   copy_to(column_amax, columns, column_factors), rowwise, e5m2, stream);
  });
  return {rows, row_factors, columns, column_factors};
}

}  // namespace fsdp::kernels
