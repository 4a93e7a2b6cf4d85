// Matrix products that read weights where they lie together and write gradients where they belong.
#pragma once

#include "fsdp/nn/functional.h"
#include "nn/node.h"

namespace fsdp::nn {

// Tensors that lie one behind the other in one storage, as one: [rows of all, columns], or [length
// of all] for vectors. Undefined where they do not.
at::Tensor joined(const Tensors& parts);

// x · weights (+ biases), side by side. x [rows, in]; weights as `lies` says → [rows, widths].
// `biases` is empty or has one for each weight.
at::Tensor products(const at::Tensor& x, const Tensors& weights, const Tensors& biases, Lies lies);
// The gradient of x. grad [rows, widths]
at::Tensor products_backward(const at::Tensor& grad, const Tensors& weights, Lies lies);
// The gradients of those weights that are wanted, in the order of `targets` (null: not wanted).
// What autograd gets is returned.
Tensors weight_gradients(const at::Tensor& grad, const at::Tensor& x,
                         const std::vector<const Target*>& targets,
                         const std::vector<int64_t>& widths, Lies lies);
// Those of the biases: sums over rows.
Tensors bias_gradients(const at::Tensor& grad, const std::vector<const Target*>& targets,
                       const std::vector<int64_t>& widths);

// place = a · b, or place += a · b; the product of half-precision matrices is summed and stored in
// float32 if the place is float32 (on CUDA; elsewhere rounded once).
void product_into(const shard::Place& place, const at::Tensor& a, const at::Tensor& b);

std::vector<int64_t> widths_of(const Tensors& weights, Lies lies);

}  // namespace fsdp::nn
