// Functions of language models with gradients of their own: fewer passes over memory than the same
// written with torch's operators, and less kept for backward. docs/layers.md shows them in use.
//
// Of float32, bfloat16 and float16 tensors on the CPU and on CUDA; for other types the same is
// computed with torch's operators. An input of another floating-point type than the weight is cast
// to the weight's. A gradient of a gradient is not supported: backward with create_graph is an
// Error.
//
// "rows" stands for any leading dimensions. Optional tensors may be undefined ({}).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::nn {

// --- normalisation, over the last dimension ---

// x / sqrt(mean(x²) + eps) · weight. x [rows, dim], weight [dim]
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps = 1e-5);
// (x - mean) / sqrt(variance + eps) · weight + bias. The bias is optional.
at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {},
                      double eps = 1e-5);

struct NormedSum {
  at::Tensor out;  // the sum, normalised
  at::Tensor sum;  // x + residual; x itself where the residual is undefined
};
// The add of a residual stream and the norm that follows, in one pass each way.
NormedSum add_rms_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                       double eps = 1e-5);
NormedSum add_layer_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                         const at::Tensor& bias = {}, double eps = 1e-5);

// --- matrices ---

// Which way round a weight lies.
enum class Lies {
  kOutIn,  // [out, in], as a torch::nn::Linear's
  kInOut,  // [in, out], as in the files of GPT-2
};

// x [rows, in] → [rows, out]. The bias [out] is optional.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {},
                  Lies lies = Lies::kOutIn);

// The linears behind one norm: norm(x + residual) through each of `weights`, their results side by
// side in one tensor. For backward the sum is kept and not the normalised rows, which are computed
// again. It is one matrix product where the weights lie side by side in memory, as those of one
// sharded unit do, and one each elsewhere. `biases`: none, or one for each weight.
struct NormedLinears {
  at::Tensor out;  // [rows, widths of all weights together]
  at::Tensor sum;  // as NormedSum's
};
NormedLinears norm_linears(const at::Tensor& x, const at::Tensor& residual,
                           const at::Tensor& norm_weight, double eps,
                           const std::vector<at::Tensor>& weights,
                           const std::vector<at::Tensor>& biases = {});
NormedLinears layer_norm_linears(const at::Tensor& x, const at::Tensor& residual,
                                 const at::Tensor& norm_weight, const at::Tensor& norm_bias,
                                 double eps, const std::vector<at::Tensor>& weights,
                                 const std::vector<at::Tensor>& biases = {},
                                 Lies lies = Lies::kOutIn);

// --- activations ---

// silu(gate) · up. gate_up [rows, 2 · width], the gate first → [rows, width]
at::Tensor swiglu(const at::Tensor& gate_up);
// `approximate`: "none", or "tanh" as in GPT-2.
at::Tensor gelu(const at::Tensor& x, const std::string& approximate = "none");

// linear(swiglu(gate_up), …) and linear(gelu(x), …): only what is activated is kept for backward.
at::Tensor swiglu_linear(const at::Tensor& gate_up, const at::Tensor& weight,
                         const at::Tensor& bias = {}, Lies lies = Lies::kOutIn);
at::Tensor gelu_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {},
                       const std::string& approximate = "none", Lies lies = Lies::kOutIn);

// --- attention ---

// Turns each pair (x[i], x[i + head_dim / 2]) of a head by an angle: rotary positions.
// x [batch, tokens, heads, head_dim]; cos, sin [tokens, head_dim] or [batch, tokens, head_dim], in
// float32 or x's type, the second half of a row repeating the first.
at::Tensor rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

struct Heads {
  at::Tensor q;     // [batch, heads, tokens, head_dim]
  at::Tensor k, v;  // [batch, kv_heads, tokens, head_dim]
};
// Cuts qkv [batch, tokens, (heads + 2 · kv_heads) · head_dim] into heads and turns those of q and
// k. Without a copy: qkv is overwritten and not to be used again.
Heads rope_heads(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin, int64_t heads,
                 int64_t kv_heads);

struct AttentionOptions {
  bool causal = false;   // token i sees the keys 0 to i
  at::Tensor mask = {};  // bool, or added to the scores; broadcast to [batch, heads, queries, keys]
  double dropout = 0;    // of the shares
  std::optional<double> scale = {};  // 1 / sqrt(head_dim)
};
// softmax(q · k · scale) · v, [batch, heads, tokens, head_dim]; k and v may have fewer heads, by a
// whole factor. On CUDA in half precision, where a gradient is wanted of 64 tokens or more and
// there is no mask: cuDNN's, which is the fastest; flash attention where deterministic algorithms
// are asked for, and everywhere else what torch chooses.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const AttentionOptions& options = {});

// rope_heads and attention: [batch, tokens, heads · head_dim].
at::Tensor rope_attention(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin,
                          int64_t heads, int64_t kv_heads, const AttentionOptions& options = {});

// --- the ends of a model ---

// ids int64 of any shape, weight [vocab, dim] → [ids, dim]. The row of `padding_idx` gets no
// gradient.
at::Tensor embedding(const at::Tensor& ids, const at::Tensor& weight,
                     std::optional<int64_t> padding_idx = {});

enum class Reduction { kMean, kSum, kNone };

struct CrossEntropyOptions {
  Reduction reduction = Reduction::kMean;  // over the targets that count
  int64_t ignore_index = -100;             // targets that do not
};
// In float32. logits [rows, vocab], targets int64 [rows]
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                         const CrossEntropyOptions& options = {});

struct LinearCrossEntropyOptions {
  Reduction reduction = Reduction::kMean;  // or kSum
  int64_t ignore_index = -100;
  int64_t chunk = 0;  // rows whose logits exist at a time; 0: those of 64 Mi, but at least 2048
};
// cross_entropy(linear(hidden, weight), targets) without ever holding all logits. Where gradients
// are wanted, forward computes them as well, those of the weight in float32.
// hidden [rows, dim], weight [vocab, dim], targets int64 [rows]
at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                const at::Tensor& targets,
                                const LinearCrossEntropyOptions& options = {});

}  // namespace fsdp::nn
