// The products of linears in fp8 or in the weight's type: what nodes call instead of products.h.
//
// y multiplies the rows of x and of the weights; the gradient of x the rows of y's gradient and the
// columns of the weights; the gradient of the weights the columns of both. Weights are quantised at
// each use: their bytes would otherwise have to be kept beside the gathered unit, and a pass over
// the weights is short beside products of many rows.
#pragma once

#include <optional>

#include "kernels/fp8.h"
#include "nn/products.h"

namespace fsdp::nn {

// `fp8`, or kNone where these sizes or dtypes have no products in fp8.
Fp8 usable(Fp8 fp8, const at::Tensor& x, const Tensors& weights, WeightLayout layout);

// Whether gradients of weights are products in fp8, too.
inline bool quantises_gradients(Fp8 fp8) {
  return fp8 != Fp8::kNone && fp8 != Fp8::kRowwiseBf16Grad;
}

kernels::fp8::Scaling scaling_of(Fp8 fp8);

// What forward leaves for backward.
struct Fp8Kept {
  bool wants_columns = false;   // set by the caller
  kernels::fp8::Bytes columns;  // of x, if they are wanted
  at::Tensor weight_factors;    // of the weights' rows
};

// As products().
at::Tensor products_as(Fp8 fp8, const at::Tensor& x, const Tensors& weights, const Tensors& biases,
                       WeightLayout layout, Fp8Kept& kept);
// The same in fp8 from the rows of x; the result has the dtype `type`.
at::Tensor fp8_products(Fp8 fp8, const kernels::fp8::Bytes& x, const Tensors& weights,
                        const Tensors& biases, at::ScalarType type, Fp8Kept& kept);

// functional.h's linear(); nullopt where these sizes or dtypes have no products in fp8.
std::optional<at::Tensor> linear_in_fp8(const at::Tensor& x, const at::Tensor& weight,
                                        const at::Tensor& bias, Fp8 fp8);

// y's gradient, for products in backward.
class ProductsBackward {
 public:
  // gradient [.., widths], as autograd passed it. to_x, to_weights: which of the functions below
  // will be called.
  ProductsBackward(Fp8 fp8, const at::Tensor& gradient, bool to_x, bool to_weights);

  // As products_backward(). `weight_factors`: Fp8Kept's.
  at::Tensor to_x(const Tensors& weights, WeightLayout layout,
                  const at::Tensor& weight_factors) const;
  // As weight_gradients(). In fp8 x may be undefined if its columns are given.
  Tensors to_weights(const at::Tensor& x, const kernels::fp8::Bytes& columns,
                     const std::vector<const Target*>& targets, const std::vector<int64_t>& widths,
                     WeightLayout layout) const;

 private:
  Fp8 fp8_;
  at::Tensor grad_;
  kernels::fp8::Quantised bytes_;
};

}  // namespace fsdp::nn
