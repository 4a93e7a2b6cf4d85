// Fused operators of language models, forward and backward, for the CPU, CUDA and meta tensors.
//
// Each function calls an operator of the dispatcher (fsdp::rms_norm, …), so that a sharded
// parameter is gathered when an operator reads it, a profiler shows it by name, and a dry run on
// the meta device works. None of them records a graph: src/nn does that. Backward needs the
// arguments of forward, plus one or two numbers per row.
//
// Floating-point tensors are float32, bfloat16 or float16, the same for all tensors of a call
// unless noted; sums are computed in float32, in an order that doesn't depend on threads or on the
// device's scheduling: the same inputs give the same bits. "rows" stands for any leading
// dimensions; tensors are contiguous unless noted.
//
// A parameter's gradient is written to `grad_weight`, which has the parameter's sizes and any of
// the dtypes above; with `accumulate` it is added to what is there.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>

#include "fsdp/init_parameters.h"

namespace fsdp::kernels {

// --- normalisation ---

struct Normed {
  at::Tensor out;   // [rows, dim]
  at::Tensor sum;   // x + residual, [rows, dim]; empty [0] without a residual
  at::Tensor mean;  // [rows] float32; layer_norm only, else undefined
  at::Tensor rstd;  // [rows] float32
};

// x, residual [rows, dim]; weight, bias [dim]. `residual` and `bias` may be undefined. The sum is
// rounded to the dtype of x before it is normalised, as with two operators.
Normed rms_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                double eps);
Normed layer_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                  const at::Tensor& bias, double eps);

struct NormGradients {
  at::Tensor x;    // [rows, dim]; also the residual's
  at::Tensor out;  // forward's result again if requested, otherwise empty [0]
};

// `grad` is the gradient of out; `grad_sum` (undefined: none) is the gradient from other readers of
// the normalised tensor, added in the same pass. `x` is the tensor that was normalised (the sum, if
// there was a residual). grad_weight and grad_bias are undefined if not wanted.
NormGradients rms_norm_backward(const at::Tensor& grad, const at::Tensor& grad_sum,
                                const at::Tensor& x, const at::Tensor& rstd,
                                const at::Tensor& weight, const at::Tensor& grad_weight,
                                bool accumulate, bool want_out);
NormGradients layer_norm_backward(const at::Tensor& grad, const at::Tensor& grad_sum,
                                  const at::Tensor& x, const at::Tensor& mean,
                                  const at::Tensor& rstd, const at::Tensor& weight,
                                  const at::Tensor& bias, const at::Tensor& grad_weight,
                                  const at::Tensor& grad_bias, bool accumulate, bool want_out);

// --- rotary positions ---

// Rotates the first `heads` heads of each token in place: element i of a head's first half with
// element i of its second half. x [batch, tokens, width], width >= heads * head_dim, rows
// contiguous in the last dimension (a slice of wider rows is fine). cos, sin [tokens, head_dim] or
// [batch, tokens, head_dim], of x's dtype or float32; their two halves are equal. `inverse` rotates
// back, which is what backward does.
void rope_(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, int64_t heads,
           bool inverse);

// Backward of rope_ on the q and k of a packed [batch, tokens, (heads + 2 kv_heads) * head_dim]:
// rotates the gradients of q and k back and packs all three. q [batch, heads, tokens, head_dim], k,
// v [batch, kv_heads, tokens, head_dim], any strides with a contiguous last dimension.
at::Tensor rope_pack(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const at::Tensor& cos, const at::Tensor& sin);

// --- activations ---

// gate_up [rows, 2 * width], the gate first: silu(gate) * up, [rows, width].
at::Tensor swiglu(const at::Tensor& gate_up);
// Returns the gradient of gate_up and, if `want_out`, forward's result again (otherwise empty [0]).
std::tuple<at::Tensor, at::Tensor> swiglu_backward(const at::Tensor& grad,
                                                   const at::Tensor& gate_up, bool want_out);

// `tanh`: GPT-2's approximation instead of the error function.
at::Tensor gelu(const at::Tensor& x, bool tanh);
std::tuple<at::Tensor, at::Tensor> gelu_backward(const at::Tensor& grad, const at::Tensor& x,
                                                 bool tanh, bool want_out);

// --- loss and embedding ---

// logits [rows, vocab] (rows may be a slice of wider ones), targets [rows] int64. A row's loss is
// its negative log-likelihood, 0 where the target is `ignore_index`; float32, [rows]. Also returns
// the log of each row's sum of exponentials. A target outside the vocabulary gives a NaN loss.
std::tuple<at::Tensor, at::Tensor> cross_entropy(const at::Tensor& logits,
                                                 const at::Tensor& targets, int64_t ignore_index);
// The same losses; logits become their gradient times `scale` (one float32 on the device).
at::Tensor cross_entropy_(const at::Tensor& logits, const at::Tensor& targets,
                          const at::Tensor& scale, int64_t ignore_index);
// The gradient of logits; grad [rows] float32, of each row's loss.
at::Tensor cross_entropy_backward(const at::Tensor& grad, const at::Tensor& logits,
                                  const at::Tensor& targets, const at::Tensor& log_sum,
                                  int64_t ignore_index);

// grad [rows, dim], ids [rows] int64, grad_weight [vocab, dim]: each row of the gradient is added
// to the row of its id. Without `accumulate`, rows that no id names become 0. Rows whose id is
// `padding_idx` (-1: none) are skipped.
void embedding_backward(const at::Tensor& grad, const at::Tensor& ids,
                        const at::Tensor& grad_weight, int64_t padding_idx, bool accumulate);

// --- random numbers ---

// Element i of `out` becomes number first + i of a sequence that `key` chooses, distributed as
// described, computed in float32 and rounded to the dtype of out (float64 as well). The same bits
// on every device, so a tensor may be filled in parts and anywhere.
void fill_random_(const at::Tensor& out, const Distribution& distribution, uint64_t key,
                  int64_t first);

// --- copies ---

// target = source * scale, or target += source * scale; `scale` is one float32 on the device, or
// undefined for 1. Dtypes may differ; sizes are equal.
void scale_into(const at::Tensor& target, const at::Tensor& source, const at::Tensor& scale,
                bool accumulate);

}  // namespace fsdp::kernels
