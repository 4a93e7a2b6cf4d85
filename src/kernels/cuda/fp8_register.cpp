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
#include "kernels/outputs.h"

namespace fsdp::kernels {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

cuda::Dtype dtype_of_matrix(const Tensor& x) {
  const auto type = x.scalar_type();
  return type == at::kFloat      ? cuda::Dtype::kFloat32
         : type == at::kBFloat16 ? cuda::Dtype::kBFloat16
                                 : cuda::Dtype::kFloat16;
}

// At a multiple of 16 bytes.
Tensor aligned(const Tensor& x) {
  return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0 ? x : x.clone();
}

// A matrix as kernels take it. Holds the tensors that it points to.
struct Operand {
  Tensor x, weight;
  cuda::Fp8Matrix matrix;

  Operand(const Tensor& given, const Optional& rstd, const Optional& norm_weight, bool swiglu,
          const fp8::Matrix& size)
      : x(aligned(given)), weight(norm_weight ? aligned(*norm_weight) : Tensor()) {
    matrix.data = x.const_data_ptr();
    matrix.rstd = rstd ? rstd->const_data_ptr<float>() : nullptr;
    matrix.weight = weight.defined() ? weight.const_data_ptr() : nullptr;
    matrix.swiglu = swiglu;
    matrix.rows = size.rows;
    matrix.columns = size.columns;
    matrix.dtype = dtype_of_matrix(x);
  }
};

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

std::tuple<Tensor, Tensor> fp8_amax(const Tensor& x, const Optional& rstd, const Optional& weight,
                                    bool swiglu, bool rowwise, bool rows, bool columns) {
  const fp8::Matrix size = fp8::check_source(x, rstd, weight, swiglu);
  const Operand operand(x, rstd, weight, swiglu, size);
  const int64_t row_count = rowwise ? (rows ? size.rows : 0) : 1;
  const int64_t column_count = rowwise && columns ? size.columns : 0;
  const auto made = [&](int64_t count) {
    return at::empty({count}, x.options().dtype(at::kFloat));
  };
  const Tensor of_rows = made(row_count), of_columns = made(column_count);
  on_stream_of(x, [&](cudaStream_t stream) {
    cuda::fp8_amax(operand.matrix, {floats(of_rows), floats(of_columns), rowwise}, stream);
  });
  return {of_rows, of_columns};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> fp8_cast(const Tensor& x, const Optional& rstd,
                                                    const Optional& weight, bool swiglu,
                                                    const Optional& row_amax,
                                                    const Optional& column_amax, bool e5m2) {
  const fp8::Matrix size = fp8::check_source(x, rstd, weight, swiglu);
  fp8::check_magnitudes(size, x, row_amax, column_amax);
  const Operand operand(x, rstd, weight, swiglu, size);
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
    cuda::fp8_cast(operand.matrix, copy_to(row_amax, rows, row_factors),
                   copy_to(column_amax, columns, column_factors), rowwise, e5m2, stream);
  });
  return {rows, row_factors, columns, column_factors};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> fp8_quantise(const Tensor& x, bool rowwise, bool rows,
                                                        bool columns, bool e5m2) {
  const auto [row_amax, column_amax] = fp8_amax(x, {}, {}, false, rowwise, rows, columns);
  const Tensor& other = rowwise ? column_amax : row_amax;
  return fp8_cast(x, {}, {}, false, rows ? Optional(row_amax) : std::nullopt,
                  columns ? Optional(other) : std::nullopt, e5m2);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> fp8_rms_norm(const Tensor& x,
                                                                const Optional& residual,
                                                                const Tensor& weight, double eps,
                                                                bool rowwise) {
  const RowSizes size = check_rms_norm(x, residual, weight, eps);
  const bool adds = residual && residual->defined();
  const Tensor sum = empty_if(adds, x), rstd = empty_rows(x);
  const Tensor amax = at::empty({rowwise ? size.rows : 1}, x.options().dtype(at::kFloat));
  cuda::NormForward norm;
  norm.x = x.const_data_ptr();
  norm.residual = adds ? residual->const_data_ptr() : nullptr;
  norm.weight = weight.const_data_ptr();
  norm.sum = adds ? sum.mutable_data_ptr() : nullptr;
  norm.rstd = floats(rstd);
  norm.amax = floats(amax);
  norm.amax_per_row = rowwise;
  norm.rows = size.rows;
  norm.dim = size.dim;
  norm.eps = static_cast<float>(eps);
  norm.dtype = dtype_of_matrix(x);
  on_stream_of(x, [&](cudaStream_t stream) { cuda::rms_norm(norm, stream); });
  const Tensor whole = (adds ? sum : x).view({size.rows, size.dim});
  auto [rows, factors, none, no_factors] = fp8_cast(whole, rstd, weight, false, amax, {}, false);
  return {rows, sum, rstd, factors, amax};
}

}  // namespace fsdp::kernels
