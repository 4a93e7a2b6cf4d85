// The models sharded in tests: plain torch::nn code without any use of fsdp.
//
// A case builds a model (with the seed the caller has set), makes each rank's batch of a step, and
// chooses the modules that become units.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/wrap.h"

namespace fsdp::testing {

namespace nn = torch::nn;

inline constexpr double kBf16Epsilon = 1.0 / 256;

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

struct Batch {
  int step = 0;
  at::Tensor x, y;
};

struct Built {
  std::shared_ptr<nn::Module> module;  // null for TorchScript
  NamedTensors parameters, buffers;    // each tensor once, by its first name
  std::function<at::Tensor(const Batch&)> loss;

  at::Tensor parameter(const std::string& name) const;
};

struct ModelCase {
  std::string name;
  std::function<Built()> build;               // on the CPU
  std::function<Built()> build_casting = {};  // with the casts that bf16 parameters need, if any
  std::function<Batch(int step, int rank)> batch;  // on the CPU
  WrapPolicy wrap;
  bool bf16 = true;         // also works with bf16 parameters
  double tolerance = 1e-6;  // of the gradient's norm, in float32
  double bf16_tolerance = kBf16Epsilon;
  double momentum = 0.9;  // of the SGD that trains it
  double weight_decay = 0.01;
};

const std::vector<ModelCase>& model_cases();
const ModelCase& model_case(const std::string& name);

// A module and its loss as a Built.
Built built(std::shared_ptr<nn::Module> module, std::function<at::Tensor(const Batch&)> loss);

// Random numbers that depend only on the arguments; `what` distinguishes the tensors of a batch.
at::Tensor random_normal(int step, int rank, int what, at::IntArrayRef sizes);
at::Tensor random_integers(int step, int rank, int what, int64_t below, at::IntArrayRef sizes);
at::Tensor mean_square(const at::Tensor& output, const at::Tensor& target);  // in float32
// `batch` on a device, with a floating-point x cast to `type`, if given.
Batch moved(Batch batch, at::Device device, std::optional<at::ScalarType> type = {});

// An MLP of 8 linears, "layers.0" to "layers.7".
struct MlpImpl : nn::Cloneable<MlpImpl> {
  explicit MlpImpl(int64_t width = 16, int64_t depth = 8);
  void reset() override;
  at::Tensor forward(at::Tensor x);  // [n, width]
  nn::Linear layer(size_t index) const;

  int64_t width, depth;
  nn::ModuleList layers{nullptr};
};
TORCH_MODULE(Mlp);

// A block of a pre-norm transformer.
struct BlockImpl : nn::Module {
  BlockImpl(int64_t dim, int64_t heads);
  at::Tensor forward(at::Tensor x);  // [batch, tokens, dim]

  int64_t heads;
  nn::LayerNorm attention_norm{nullptr}, mlp_norm{nullptr};
  nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

// The head of a language model whose weight is the embedding's.
struct TiedHeadImpl : nn::Module {
  explicit TiedHeadImpl(at::Tensor embedding);
  at::Tensor forward(at::Tensor x);

  at::Tensor weight;
};
TORCH_MODULE(TiedHead);

struct TransformerImpl : nn::Module {
  static constexpr int64_t kVocabulary = 29, kTokens = 6;

  explicit TransformerImpl(int64_t dim = 16, int64_t heads = 2, int64_t depth = 3);
  at::Tensor forward(at::Tensor ids);                   // [batch, tokens, vocabulary]
  at::Tensor loss(at::Tensor ids, at::Tensor targets);  // [batch, tokens], the same
  Block block(size_t index) const;

  nn::Embedding embedding{nullptr};
  at::Tensor position;
  nn::ModuleList blocks{nullptr};
  nn::LayerNorm norm{nullptr};
  TiedHead head{nullptr};
};
TORCH_MODULE(Transformer);

}  // namespace fsdp::testing
