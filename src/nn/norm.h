// Norms and their backward, shared by stand-alone norms (norm.cpp) and norms followed by linears
// (norm_linears.cpp).
#pragma once

#include "kernels/ops.h"
#include "nn/node.h"

namespace fsdp::nn {

struct Norm {
  at::Tensor weight, bias;  // bias: layer norms only, optional
  double eps = 0;
  bool layer = false;  // false: RMS norm
};

kernels::Normed normalised(const at::Tensor& x, const at::Tensor& residual, const Norm& norm);

struct NormBackward {
  at::Tensor x;             // the gradient of x and of the residual
  at::Tensor out;           // forward's result, if requested
  at::Tensor weight, bias;  // gradients for autograd; undefined if written in place
};
// weight, bias: null if no gradient is needed.
NormBackward norm_backward(const at::Tensor& grad, const at::Tensor& grad_sum, const at::Tensor& x,
                           const at::Tensor& mean, const at::Tensor& rstd, const Norm& norm,
                           const Target* weight, const Target* bias, bool want_out);

// The same with torch's operators, recorded by autograd.
at::Tensor plain_norm(const at::Tensor& x, const Norm& norm);

}  // namespace fsdp::nn
