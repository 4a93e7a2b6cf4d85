/// @file
/// The decoder behind Llama, Qwen, Mistral, SmolLM, OLMo, Phi, Gemma and mixtures of experts:
/// rotary positions, grouped-query attention, a gated feed-forward or experts, and a description of
/// what differs.
///
///     models::Decoder model(models::of_family(models::Family::kQwen3, {.vocab = 151936, …}));
///
/// Parameters have the names of Hugging Face's files: model.embed_tokens.weight,
/// model.layers.0.self_attn.q_proj.weight, …, model.norm.weight, lm_head.weight. Shard it by
/// DecoderBlock.
#pragma once

#include <torch/nn/modules/container/modulelist.h>

#include <optional>
#include <utility>
#include <vector>

#include "fsdp/models/causal_lm.h"
#include "fsdp/nn/functional.h"
#include "fsdp/nn/modules.h"
#include "fsdp/nn/moe.h"

namespace fsdp::models {

/// Whose models a decoder is one of. It gives the names in config.json; the fields of DecoderConfig
/// say what is computed.
enum class Family {
  kLlama,     ///< Llama 1 to 3, SmolLM 1 and 2.
  kQwen2,     ///< Qwen2 and 2.5.
  kQwen3,     ///< Qwen3 without experts.
  kMistral,   ///< Mistral 7B and later ones without experts.
  kSmolLM3,   ///< SmolLM3.
  kOlmo2,     ///< OLMo 2.
  kPhi3,      ///< Phi-3, Phi-3.5 and Phi-4 without experts.
  kGemma3,    ///< Gemma 3, text only.
  kMixtral,   ///< Mixtral.
  kQwen3Moe,  ///< Qwen3 with experts.
  kOlmoe,     ///< OLMoE.
  kDots1,     ///< dots.llm1: DeepSeek-V3's experts with the attention of Qwen3.
};

/// Where the norms of a block are.
enum class NormPlacement {
  kBefore,  ///< Before attention and feed-forward.
  kAfter,   ///< After each, on what is added to the residual stream.
  kAround,  ///< Both.
};

/// Norms of queries and keys, before they are rotated.
enum class QKNorm {
  kNone,   ///< None.
  kHead,   ///< Of each head.
  kWhole,  ///< Of all heads together.
};

/// What the gate of the feed-forward goes through.
enum class GateActivation {
  kSilu,      ///< SwiGLU.
  kGeluTanh,  ///< GeGLU.
};

/// Llama 3.1's extension to longer contexts, by the wavelength of each rotary frequency.
///
/// Frequencies with a wavelength above context / low_freq_factor rotate `factor` times slower.
/// Those below context / high_freq_factor stay. Between the two they are interpolated.
struct RopeScaling {
  double factor = 8;                                ///< How much slower.
  double low_freq_factor = 1;                       ///< Bound of the slow ones.
  double high_freq_factor = 4;                      ///< Bound of the unchanged ones.
  int64_t original_max_position_embeddings = 8192;  ///< The context that it was trained with.
};

/// YaRN's extension to longer contexts (Qwen): rotary frequencies that turn fewer than beta_slow
/// times in the original context are `factor` times slower.
///
/// Those that turn more than beta_fast times stay. Between the two they are interpolated by their
/// index.
struct Yarn {
  double factor = 4;            ///< How much slower.
  double beta_fast = 32;        ///< Turns of the unchanged ones.
  double beta_slow = 1;         ///< Turns of the slow ones.
  double attention_factor = 0;  ///< Of cosines and sines. 0: 0.1 · ln(factor) + 1.
  bool truncate = true;         ///< The indices between which is interpolated are whole.
  int64_t original_max_position_embeddings = 32768;  ///< The context that it was trained with.
};

/// Phi-3's extension to longer contexts (LongRoPE): each rotary frequency is divided by a factor of
/// its own, by another one once a sequence is longer than the original context.
///
/// Cosines and sines are multiplied by sqrt(1 + ln(max / original) / ln(original)).
struct LongRope {
  std::vector<double> short_factors = {};           ///< One per frequency, for short sequences.
  std::vector<double> long_factors = {};            ///< Likewise for longer ones.
  int64_t original_max_position_embeddings = 4096;  ///< The longest short sequence.
  int64_t max_position_embeddings = 131072;         ///< The longest sequence.
};

/// Experts in place of the feed-forwards of blocks.
struct Mixture {
  int64_t experts = 8;       ///< In each block.
  int64_t top_k = 2;         ///< Experts of a token.
  int64_t ffn = 0;           ///< Width of an expert. 0: that of the feed-forward.
  int64_t shared = 0;        ///< Experts that every token goes through.
  int64_t dense_layers = 0;  ///< The first blocks, which have a feed-forward.
  nn::RouterScore score = nn::RouterScore::kSoftmax;  ///< Of experts.
  bool normalize = true;                              ///< The weights of a token add up to `scale`.
  double scale = 1;                                   ///< Of the weights.
  bool biased = false;  ///< Routers have a bias (MoEImpl::update_bias()).
  double balance = 0;   ///< Coefficient of nn::balance_loss(), of the mean over blocks.
  double z = 0;         ///< Coefficient of nn::router_z_loss(), of the mean over blocks.
};

/// The description of a decoder. The defaults are a Llama's.
struct DecoderConfig {
  int64_t vocab = 32000;     ///< Number of token ids.
  int64_t dim = 2048;        ///< Width of the residual stream.
  int64_t layers = 16;       ///< Number of blocks.
  int64_t heads = 16;        ///< Query heads.
  int64_t kv_heads = 0;      ///< Key and value heads, a divisor of heads. 0: as many as heads.
  int64_t head_dim = 0;      ///< Even. 0: dim / heads.
  int64_t ffn = 0;           ///< Width of the feed-forward. 0: 8/3 of dim, rounded up to 256.
  bool tied = false;         ///< The head is the embedding.
  bool qkv_bias = false;     ///< Biases of queries, keys and values (Qwen2).
  double norm_eps = 1e-5;    ///< Of the RMSNorms.
  double rope_base = 10000;  ///< Base of the rotary frequencies.
  std::optional<RopeScaling> rope_scaling = {};  ///< For longer contexts.

  /// Standard deviation of the initial matrices. Norms start at one, biases at zero.
  double init_std = 0.02;

  Family family = Family::kLlama;                     ///< Whose names config.json has.
  NormPlacement norms = NormPlacement::kBefore;       ///< In a block.
  bool norm_from_one = false;                         ///< Norms multiply by 1 + weight (Gemma).
  QKNorm qk_norm = QKNorm::kNone;                     ///< Of queries and keys.
  GateActivation activation = GateActivation::kSilu;  ///< Of the feed-forward.
  bool fused_projections = false;  ///< One matrix for q, k and v, one for gate and up (Phi-3).
  bool scaled_embedding = false;   ///< Embeddings are multiplied by sqrt(dim) (Gemma).

  int64_t query_pre_attn_scalar = 0;  ///< Scores are divided by its root. 0: head_dim.
  int64_t window = 0;                 ///< Tokens that a token sees, with itself. 0: all before it.
  int64_t full_every = 0;             ///< Each n-th layer has no window. 0: all layers have it.
  int64_t no_rope_every = 0;          ///< Each n-th layer has no positions. 0: all have them.
  double local_rope_base = 0;         ///< Base in layers with a window. 0: rope_base.
  std::optional<LongRope> long_rope = {};  ///< For longer contexts, instead of rope_scaling.
  std::optional<Yarn> yarn = {};           ///< Likewise.
  double linear_rope = 0;  ///< Likewise: all frequencies are this much slower. 0: none are.
  int64_t rotary_dim = 0;  ///< First elements of a head that are rotated (Phi-4-mini). 0: all.
  std::optional<Mixture> mixture = {};  ///< Experts in the blocks.
};

/// `config` with its zeros filled in. Throws Error if the numbers don't fit each other.
DecoderConfig checked(DecoderConfig config);
/// Number of parameters; a tied matrix counts once.
int64_t parameter_count(const DecoderConfig& config);
/// The same of those that a token uses: of the experts, as many as it goes to.
int64_t active_parameter_count(const DecoderConfig& config);
/// `sizes` as a model of a family: sets the fields from `family` to `scaled_embedding` and
/// qkv_bias.
DecoderConfig of_family(Family family, DecoderConfig sizes);
/// `sizes` with what all Qwen2 and Qwen2.5 models have: qkv_bias, rope_base 1e6, norm_eps 1e-6.
/// (Those up to 3B are also tied.)
DecoderConfig qwen2(DecoderConfig sizes);

/// The window of a layer; 0: none.
int64_t window_of(const DecoderConfig& config, int64_t layer);
/// The elements of a head that are rotated.
int64_t rotary_dim(const DecoderConfig& config);
/// Whether a layer rotates queries and keys by their positions.
bool has_positions(const DecoderConfig& config, int64_t layer);
/// Whether a layer has experts.
bool has_experts(const DecoderConfig& config, int64_t layer);

/// cos and sin of position · frequency, for each position and element of a head.
///
/// [tokens, head_dim], or [batch, tokens, head_dim] if positions differ between sequences. The
/// second half of a row repeats the first.
struct RotaryTables {
  at::Tensor cos;  ///< Cosines.
  at::Tensor sin;  ///< Sines.
};
/// The tables of positions 0 to tokens - 1, in float32. `linear`: all frequencies are divided by
/// it.
RotaryTables rotary_tables(int64_t tokens, int64_t head_dim, double base, at::Device device,
                           const std::optional<RopeScaling>& scaling = {}, double linear = 1);
/// The same with LongRoPE. `longer`: for sequences longer than the original context.
RotaryTables rotary_tables(int64_t tokens, int64_t head_dim, double base, at::Device device,
                           const LongRope& scaling, bool longer);
/// The same with YaRN.
RotaryTables rotary_tables(int64_t tokens, int64_t head_dim, double base, at::Device device,
                           const Yarn& scaling);
/// The tables that rotate nothing.
RotaryTables unrotated_tables(int64_t tokens, int64_t head_dim, at::Device device);
/// Rotates each pair (x[i], x[i + head_dim / 2]) by the angle of its position.
/// x [batch, heads, tokens, head_dim].
at::Tensor rotate(const at::Tensor& x, const RotaryTables& tables);

/// Attention of one block.
class DecoderAttentionImpl : public torch::nn::Module {
 public:
  /// `config` as checked() returns it; `layer` is the block's index in a cache.
  DecoderAttentionImpl(const DecoderConfig& config, int64_t layer);
  /// qkv: the outputs of the projections side by side; overwritten. → [batch, tokens, dim].
  at::Tensor forward(const at::Tensor& qkv, const RotaryTables& tables, const Attending& attending);

  /// Those of q, k and v, or the one of all three.
  std::vector<nn::Linear> projections() const;

  nn::Linear q_proj = nullptr;    ///< To queries.
  nn::Linear k_proj = nullptr;    ///< To keys.
  nn::Linear v_proj = nullptr;    ///< To values.
  nn::Linear qkv_proj = nullptr;  ///< To all three, with fused_projections, instead of the others.
  nn::Linear o_proj = nullptr;    ///< Back to the residual stream.
  nn::RMSNorm q_norm = nullptr;   ///< Of queries, with qk_norm.
  nn::RMSNorm k_norm = nullptr;   ///< Of keys, with qk_norm.

 private:
  at::Tensor normed(const at::Tensor& qkv) const;
  nn::Heads rotated_partly(const at::Tensor& qkv, const RotaryTables& tables) const;

  DecoderConfig config_;
  int64_t layer_;
};
/// Holder of DecoderAttentionImpl.
TORCH_MODULE(DecoderAttention);

/// Feed-forward of one block: down(activation(gate) · up).
class GatedFeedForwardImpl : public torch::nn::Module {
 public:
  /// `config` as checked() returns it.
  explicit GatedFeedForwardImpl(const DecoderConfig& config);
  /// gate_up: the outputs of the two projections side by side. → [.., dim].
  at::Tensor forward(const at::Tensor& gate_up);

  /// Those of gate and up, or the one of both.
  std::vector<nn::Linear> projections() const;

  nn::Linear gate_proj = nullptr;     ///< To the gate.
  nn::Linear up_proj = nullptr;       ///< To what is gated.
  nn::Linear gate_up_proj = nullptr;  ///< To both, with fused_projections, instead of the two.
  nn::Linear down_proj = nullptr;     ///< Back to the residual stream.

 private:
  GateActivation activation_;
};
/// Holder of GatedFeedForwardImpl.
TORCH_MODULE(GatedFeedForward);

/// One block: the unit to shard by.
class DecoderBlockImpl : public torch::nn::Module {
 public:
  /// `config` as checked() returns it; `layer` is the block's index in a cache.
  explicit DecoderBlockImpl(const DecoderConfig& config, int64_t layer = 0);
  /// Same shapes as `stream`.
  Stream forward(const Stream& stream, const RotaryTables& tables, const Attending& attending = {});

  /// Before attention. Null with NormPlacement::kAfter.
  nn::RMSNorm input_layernorm = nullptr;
  /// Hugging Face's name: after attention, but with NormPlacement::kBefore before the feed-forward.
  nn::RMSNorm post_attention_layernorm = nullptr;
  nn::RMSNorm pre_feedforward_layernorm = nullptr;   ///< With NormPlacement::kAround.
  nn::RMSNorm post_feedforward_layernorm = nullptr;  ///< Null with NormPlacement::kBefore.
  DecoderAttention self_attn = nullptr;              ///< Attention.
  GatedFeedForward mlp = nullptr;                    ///< Feed-forward. Null with experts.
  nn::MoE experts = nullptr;                         ///< Its name in the module is "mlp", too.

  /// Tokens of the feed-forward and its norms that are computed at a time (tiled()). 0: all.
  int64_t tile = 0;

 private:
  Stream add_feed_forward(const Stream& stream);
  at::Tensor written(const at::Tensor& x, const nn::RMSNorm& norm) const;
  nn::NormedSum normed(const Stream& stream, const nn::RMSNorm& norm) const;
  nn::NormedLinears read(const Stream& stream, const nn::RMSNorm& norm,
                         const std::vector<nn::Linear>& linears) const;

  bool norm_from_one_;
};
/// Holder of DecoderBlockImpl.
TORCH_MODULE(DecoderBlock);

/// Everything below the head.
class DecoderModelImpl : public torch::nn::Module {
 public:
  /// `config` as checked() returns it.
  explicit DecoderModelImpl(const DecoderConfig& config);
  /// [batch, tokens, dim].
  at::Tensor forward(const TextInputs& inputs);

  nn::Embedding embed_tokens = nullptr;  ///< Embedding of tokens.
  torch::nn::ModuleList layers;          ///< Blocks.
  nn::RMSNorm norm = nullptr;            ///< Final norm.
  at::Tensor router_loss;                ///< Of the last forward. Undefined: none.

 private:
  enum class Rotation { kNormal, kLonger, kLocal, kNone };  // kinds of tables
  struct KnownTables {
    Rotation rotation;
    RotaryTables tables;
  };

  Rotation rotation_of(int64_t layer, int64_t tokens) const;
  RotaryTables make_tables(Rotation rotation, int64_t tokens, at::Device device) const;
  RotaryTables tables_for(Rotation rotation, const at::Tensor& x, const Attending& attending);
  RotaryTables tables_of(Rotation rotation, const at::Tensor& x, int64_t tokens, bool more);

  DecoderConfig config_;
  // By kind, dtype and device; not parameters or buffers. They are never freed, because a recorded
  // step may read them.
  std::vector<KnownTables> tables_;
};
/// Holder of DecoderModelImpl.
TORCH_MODULE(DecoderModel);

/// A decoder with its head.
class DecoderImpl : public CausalLMImpl {
 public:
  /// Initializes the weights.
  explicit DecoderImpl(const DecoderConfig& config = {});

  at::Tensor hidden(const TextInputs& inputs) override;
  at::Tensor head() const override { return lm_head->weight; }
  int64_t vocab() const override { return config_.vocab; }
  int64_t layers() const override { return config_.layers; }
  int64_t cache_limit() const override;
  void tile_feed_forward(int64_t tokens) override;
  double flops_per_token(int64_t tokens) const override;
  Distribution initial(const std::string& name, at::IntArrayRef sizes) const override;

  /// The checked configuration.
  const DecoderConfig& config() const { return config_; }

  DecoderModel model = nullptr;  ///< Everything below the head.
  LMHead lm_head = nullptr;      ///< The head.

 protected:
  at::Tensor take_router_loss() override { return std::exchange(model->router_loss, {}); }

 private:
  DecoderConfig config_;
};
/// Holder of DecoderImpl: `models::Decoder model(config)`.
TORCH_MODULE(Decoder);

}  // namespace fsdp::models
