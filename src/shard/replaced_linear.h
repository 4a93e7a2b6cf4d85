// Products x · weightᵀ (+ bias) that another function computes where a sharded parameter is the
// weight: a torch::nn::Linear then computes in another way without a change. They are found where
// they arrive as aten::linear, or as aten::addmm or aten::matmul with the parameter's transpose.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>

namespace fsdp::shard {

// x, weight, bias (may be undefined). nullopt: this call is torch's after all. It must not call
// these operators with this weight itself.
using LinearFunction = std::function<std::optional<at::Tensor>(
    const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias)>;

// From now on; an empty function ends it. False: the tensor isn't a whole sharded parameter.
bool replace_linear(const at::Tensor& weight, LinearFunction function);

}  // namespace fsdp::shard
