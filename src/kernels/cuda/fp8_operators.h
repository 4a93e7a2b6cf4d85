// The passes of kernels/fp8.h for CUDA tensors, which register.cpp registers beside the operators
// of ops.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace fsdp::kernels {

std::tuple<at::Tensor, at::Tensor> fp8_amax(const at::Tensor& x,
                                            const std::optional<at::Tensor>& rstd,
                                            const std::optional<at::Tensor>& weight, bool swiglu,
                                            bool rowwise, bool rows, bool columns);
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> fp8_cast(
    const at::Tensor& x, const std::optional<at::Tensor>& rstd,
    const std::optional<at::Tensor>& weight, bool swiglu, const std::optional<at::Tensor>& row_amax,
    const std::optional<at::Tensor>& column_amax, bool e5m2);
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> fp8_quantise(const at::Tensor& x,
                                                                        bool rowwise, bool rows,
                                                                        bool columns, bool e5m2);
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> fp8_rms_norm(
    const at::Tensor& x, const std::optional<at::Tensor>& residual, const at::Tensor& weight,
    double eps, bool rowwise);

}  // namespace fsdp::kernels
