// Matrix products that read adjacent weights as one matrix and write gradients into the buffers
// they are reduced from.
#pragma once

#include <c10/util/FunctionRef.h>

#include "fsdp/nn/functional.h"
#include "nn/node.h"

namespace fsdp::nn {

// Tensors that are adjacent in one storage, as one tensor: [rows of all, columns], or [length of
// all] for vectors. Undefined if they aren't adjacent.
at::Tensor joined(const Tensors& parts);

// x · weights (+ biases), side by side. x [rows, in]; weights in `layout` → [rows, widths].
// `biases` is empty or has one per weight.
at::Tensor products(const at::Tensor& x, const Tensors& weights, const Tensors& biases,
                    WeightLayout layout);
// The gradient of x. grad [rows, widths]
at::Tensor products_backward(const at::Tensor& grad, const Tensors& weights, WeightLayout layout);
// Writes the gradients of the weights, in the order of `targets` (null: not needed). Returns the
// gradients for autograd.
Tensors weight_gradients(const at::Tensor& grad, const at::Tensor& x,
                         const std::vector<const Target*>& targets,
                         const std::vector<int64_t>& widths, WeightLayout layout);
// The gradients of weights in the layout kOutIn by `write`, which is called with the place of a
// gradient and the columns of `grad` that it belongs to: one call if the places are adjacent.
Tensors write_weight_gradients(
    const std::vector<const Target*>& targets, const std::vector<int64_t>& widths,
    c10::function_ref<void(const shard::GradientPlace&, int64_t first, int64_t count)> write);
// The same for the biases: sums over rows.
Tensors bias_gradients(const at::Tensor& grad, const std::vector<const Target*>& targets,
                       const std::vector<int64_t>& widths);

// place = a · b, or place += a · b. With half-precision matrices and a float32 place, the product
// is summed and stored in float32 on CUDA; elsewhere it is rounded once.
void product_into(const shard::GradientPlace& place, const at::Tensor& a, const at::Tensor& b);

std::vector<int64_t> widths_of(const Tensors& weights, WeightLayout layout);

}  // namespace fsdp::nn
