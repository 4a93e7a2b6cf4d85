// The norms, and what backward needs of them: shared by those that stand alone (norm.cpp) and those
// with linears behind them (norm_linears.cpp).
#pragma once

#include "kernels/ops.h"
#include "nn/node.h"

namespace fsdp::nn {

struct Norm {
  at::Tensor weight, bias;  // the bias only of a layer norm, and optional there
  double eps = 0;
  bool layer = false;  // else RMS
};

kernels::Normed normalised(const at::Tensor& x, const at::Tensor& residual, const Norm& norm);

// Of the gradients of a norm's parameters, what autograd gets, and of the rest.
struct NormBackward {
  at::Tensor x;    // also the residual's
  at::Tensor out;  // once more, if wanted
  at::Tensor weight, bias;
};
// weight, bias: null where no gradient is wanted.
NormBackward norm_backward(const at::Tensor& grad, const at::Tensor& grad_sum, const at::Tensor& x,
                           const at::Tensor& mean, const at::Tensor& rstd, const Norm& norm,
                           const Target* weight, const Target* bias, bool want_out);

// The same with torch's operators, and a graph.
at::Tensor plain_norm(const at::Tensor& x, const Norm& norm);

}  // namespace fsdp::nn
