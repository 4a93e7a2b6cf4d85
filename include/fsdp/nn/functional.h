/// @file
/// Functions for language models with their own gradients: fewer passes over memory than torch's
/// operators, and less kept for backward. docs/layers.md shows them in use.
///
/// They have kernels for float32, bfloat16 and float16 on the CPU and on CUDA; other types use
/// torch's operators. An input whose floating-point type differs from the weight's is cast to the
/// weight's. Second derivatives aren't supported: backward with create_graph is an Error.
///
/// "rows" stands for any leading dimensions. Optional tensors may be undefined ({}).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/context_parallel.h"

/// Layers and functions for models.
namespace fsdp::nn {

/// @name Normalization over the last dimension
/// @{

/// x / sqrt(mean(x²) + eps) · weight. x [rows, dim], weight [dim].
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps = 1e-5);
/// (x - mean) / sqrt(variance + eps) · weight + bias. The bias is optional.
at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {},
                      double eps = 1e-5);

/// A residual sum and its norm.
struct NormedSum {
  at::Tensor out;  ///< The normalized sum.
  at::Tensor sum;  ///< x + residual; x itself if the residual is undefined.
};
/// rms_norm() of x + residual, in one pass each way.
NormedSum add_rms_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                       double eps = 1e-5);
/// layer_norm() of x + residual, in one pass each way.
NormedSum add_layer_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                         const at::Tensor& bias = {}, double eps = 1e-5);

/// @}

/// The layout of a weight.
enum class WeightLayout {
  kOutIn,  ///< [out, in], as in torch::nn::Linear.
  kInOut,  ///< [in, out], as in GPT-2's files.
};

/// How a linear's matrix products are computed: in its weight's type, or with operands of one byte
/// (nn/fp8.h).
enum class Fp8 {
  kNone,            ///< In the weight's type.
  kTensorwise,      ///< fp8 (e4m3), one factor per matrix.
  kRowwise,         ///< fp8 (e4m3), one factor per row of each operand.
  kRowwiseBf16Grad  ///< kRowwise, but gradients of weights in the weight's type.
};

/// How a frozen weight is stored: in its type, or in blocks of 64 numbers along its rows that share
/// a scale (nn/quantised.h).
enum class Quant {
  kNone,       ///< In its type.
  kNf4,        ///< 4 bits per number, one of 16 levels, and a float32 scale per block.
  kNf4Double,  ///< kNf4 with scales of 8 bits.
  kInt8        ///< 8 bits per number and a float32 scale per block.
};

/// @name Matrix products
/// @{

/// x [rows, in] → [rows, out]. The bias [out] is optional.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {},
                  WeightLayout layout = WeightLayout::kOutIn, Fp8 fp8 = Fp8::kNone);

/// Several linears of one input, results side by side: x [rows, in] → [rows, sum of the weights'
/// widths]. One matrix product if the weights are adjacent in memory, else one each. `biases`:
/// none, or one per weight.
at::Tensor linears(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                   const std::vector<at::Tensor>& biases = {}, Fp8 fp8 = Fp8::kNone);

/// linears() with quantised weights [width, bytes of a row] (LinearImpl::quantise()), which get no
/// gradients.
///
/// Forward and backward restore one weight at a time, in x's type. `biases`: none, or one per
/// weight.
at::Tensor quantised_linears(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                             const std::vector<at::Tensor>& biases, Quant quant);

/// The result of norm_linears().
struct NormedLinears {
  at::Tensor out;  ///< [rows, sum of the weights' widths].
  at::Tensor sum;  ///< As in NormedSum.
};
/// Several linears after one norm: rms_norm(x + residual) through each of `weights`, results side
/// by side.
///
/// Backward keeps the sum and recomputes the normalized rows. It is one matrix product if the
/// weights are adjacent in memory, as in a sharded unit, else one each. `biases`: none, or one per
/// weight.
NormedLinears norm_linears(const at::Tensor& x, const at::Tensor& residual,
                           const at::Tensor& norm_weight, double eps,
                           const std::vector<at::Tensor>& weights,
                           const std::vector<at::Tensor>& biases = {}, Fp8 fp8 = Fp8::kNone);
/// The same with layer_norm().
NormedLinears layer_norm_linears(const at::Tensor& x, const at::Tensor& residual,
                                 const at::Tensor& norm_weight, const at::Tensor& norm_bias,
                                 double eps, const std::vector<at::Tensor>& weights,
                                 const std::vector<at::Tensor>& biases = {},
                                 WeightLayout layout = WeightLayout::kOutIn, Fp8 fp8 = Fp8::kNone);

/// @}
/// @name Activations
/// @{

/// silu(gate) · up. gate_up [rows, 2 · width], the gate first → [rows, width].
at::Tensor swiglu(const at::Tensor& gate_up);
/// GELU. `approximate`: "none", or "tanh" as in GPT-2.
at::Tensor gelu(const at::Tensor& x, const std::string& approximate = "none");

/// linear(swiglu(gate_up), …). Backward keeps only gate_up.
at::Tensor swiglu_linear(const at::Tensor& gate_up, const at::Tensor& weight,
                         const at::Tensor& bias = {}, WeightLayout layout = WeightLayout::kOutIn,
                         Fp8 fp8 = Fp8::kNone);
/// linear(gelu(gate, "tanh") · up, …), as in Gemma. Backward keeps only gate_up.
at::Tensor geglu_linear(const at::Tensor& gate_up, const at::Tensor& weight,
                        const at::Tensor& bias = {}, WeightLayout layout = WeightLayout::kOutIn,
                        Fp8 fp8 = Fp8::kNone);
/// linear(gelu(x), …). Backward keeps only x.
at::Tensor gelu_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {},
                       const std::string& approximate = "none",
                       WeightLayout layout = WeightLayout::kOutIn, Fp8 fp8 = Fp8::kNone);

/// @}
/// @name Attention
/// @{

/// Rotary positions: rotates each pair (x[i], x[i + head_dim / 2]) of a head by an angle.
///
/// x [batch, tokens, heads, head_dim]; cos, sin [tokens, head_dim] or [batch, tokens, head_dim], in
/// float32 or x's type. The second half of a row repeats the first.
at::Tensor rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

/// Queries, keys and values by head.
struct Heads {
  at::Tensor q;  ///< [batch, heads, tokens, head_dim].
  at::Tensor k;  ///< [batch, kv_heads, tokens, head_dim].
  at::Tensor v;  ///< [batch, kv_heads, tokens, head_dim].
};
/// Splits qkv [batch, tokens, (heads + 2 · kv_heads) · head_dim] into heads and rotates those of q
/// and k. In place: qkv is overwritten, so don't use it again.
Heads rope_heads(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin, int64_t heads,
                 int64_t kv_heads);

/// Options of attention().
struct AttentionOptions {
  bool causal = false;  ///< Token i sees keys 0 to i.

  /// bool, or added to the scores. Broadcast to [batch, heads, queries, keys].
  at::Tensor mask = {};
  double dropout = 0;                ///< On the attention weights.
  std::optional<double> scale = {};  ///< Default: 1 / sqrt(head_dim).

  /// A sliding window, beside `causal` or a bool mask: each token sees this many keys, the last one
  /// its own. The queries are those of the last tokens. 0: all. Keys outside of the window cost
  /// nothing where it is much shorter than the sequence.
  int64_t window = 0;

  /// int32 [documents + 1]: where each document begins in the flattened batch, and the end of the
  /// last; some may be empty. Attention stays within a document, beside `causal` and
  /// `window`; what it doesn't see isn't computed. A document lies in one sequence. On CUDA in half
  /// precision without dropout, flash attention reads it on the device. Elsewhere the host does.
  at::Tensor documents = {};

  /// The ranks that share the sequences: q, k, v and the result are this rank's parts, `mask` and
  /// `documents` describe whole sequences. Calls are then collective over these ranks.
  Context context = {};
};
/// softmax(q · k · scale) · v, each [batch, heads, tokens, head_dim].
///
/// The heads of k and v may be fewer by a whole factor. Training in half precision on CUDA with 64
/// tokens or more uses cuDNN, which is fastest, unless there is a mask or dropout or deterministic
/// algorithms are on (then flash attention). Otherwise torch chooses.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const AttentionOptions& options = {});

/// rope_heads() and attention() → [batch, tokens, heads · head_dim].
at::Tensor rope_attention(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin,
                          int64_t heads, int64_t kv_heads, const AttentionOptions& options = {});

/// @}
/// @name Embeddings
/// @{

/// ids int64 of any shape, weight [vocab, dim] → [ids, dim]. The row of `padding_idx` gets no
/// gradient.
at::Tensor embedding(const at::Tensor& ids, const at::Tensor& weight,
                     std::optional<int64_t> padding_idx = {});

/// @}

/// How a loss combines its rows.
enum class Reduction {
  kMean,  ///< Mean over the targets that count.
  kSum,   ///< Sum over the targets that count.
  kNone,  ///< One loss per row.
};

/// @name Losses
/// @{

/// Options of cross_entropy().
struct CrossEntropyOptions {
  Reduction reduction = Reduction::kMean;  ///< How rows combine.
  int64_t ignore_index = -100;             ///< Targets that don't count.
};
/// Cross-entropy in float32. logits [rows, vocab], targets int64 [rows].
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                         const CrossEntropyOptions& options = {});

/// Options of linear_cross_entropy().
struct LinearCrossEntropyOptions {
  Reduction reduction = Reduction::kMean;  ///< How rows combine.
  int64_t ignore_index = -100;             ///< Targets that don't count.
  int64_t chunk = 0;  ///< Rows of logits held at once. 0: 64 Mi logits, but at least 2048 rows.
};
/// cross_entropy(linear(hidden, weight), targets) without holding all logits.
///
/// Forward also computes the gradients, if any are needed; the weight's in float32. With kNone
/// backward does, and computes the logits again.
/// hidden [rows, dim], weight [vocab, dim], targets int64 [rows].
at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                const at::Tensor& targets,
                                const LinearCrossEntropyOptions& options = {});

/// @}

}  // namespace fsdp::nn
