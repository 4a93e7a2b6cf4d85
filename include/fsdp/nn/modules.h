/// @file
/// Modules with the parameters, names, options and initial weights of torch::nn's, and gradients
/// that need no copy (nn/functional.h).
///
/// They derive from torch::nn's modules, so `wrap::modules<torch::nn::Linear>()` finds both.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "fsdp/nn/functional.h"

namespace fsdp::nn {

/// One of the two matrices of an adapter.
class AdapterMatrixImpl : public torch::nn::Module {
 public:
  /// `weight` becomes its parameter.
  explicit AdapterMatrixImpl(const at::Tensor& weight);

  at::Tensor weight;  ///< [rows, columns].
};

/// A module of one matrix product that may have an adapter (add_lora() in nn/lora.h), which adds
/// scale · B · A · dropout(x).
class Adaptable {
 public:
  virtual ~Adaptable() = default;

  /// Adds an adapter whose B is zero. The weight and the bias stay as they are.
  void add_adapter(int64_t rank, double scale, double dropout);
  /// Whether it has an adapter.
  bool has_adapter() const { return lora_A != nullptr; }
  /// Whether it is computed with one: not within WithoutAdapters.
  bool uses_adapter() const { return has_adapter() && !without_adapter_; }
  /// What the adapter adds: [.., in] → [.., out].
  at::Tensor adapter(const at::Tensor& x) const;

  /// The product beside which it is.
  struct Product {
    torch::nn::Module& module;  ///< The module itself.
    at::Tensor weight;          ///< Its weight.
    int64_t in;                 ///< Columns of x.
    int64_t out;                ///< Columns of the result.
  };
  virtual Product product() = 0;  ///< Of this module.

  std::shared_ptr<AdapterMatrixImpl> lora_A;  ///< [rank, in]. Null without an adapter.
  std::shared_ptr<AdapterMatrixImpl> lora_B;  ///< [out, rank]. Null without an adapter.

 protected:
  /// Gives a copy an adapter of the same kind, if this has one.
  void add_adapter_to(Adaptable& copy) const;

 private:
  friend class WithoutAdapters;
  double scale_ = 0, dropout_ = 0;  // of the adapter
  bool without_adapter_ = false;
};

/// A linear layer. Constructors are torch's.
class LinearImpl : public torch::nn::LinearImpl, public Adaptable {
 public:
  using torch::nn::LinearImpl::LinearImpl;
  /// [.., in] → [.., out].
  at::Tensor forward(const at::Tensor& x);

  Product product() override;

  Fp8 fp8 = Fp8::kNone;  ///< How its products are computed; convert_to_fp8() sets it.

  /// Stores the weight in few bits from now on, as bytes, and freezes it. The columns must be a
  /// multiple of 64. Not for a sharded linear.
  void quantise(Quant quant);
  /// How the weight is stored.
  Quant quant() const { return quant_; }

  /// A deep copy.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override;

 private:
  Quant quant_ = Quant::kNone;
};
/// Holder of LinearImpl: `nn::Linear up(512, 2048)`.
TORCH_MODULE(Linear);

/// Layer normalization. Constructors are torch's. Several normalized dimensions use torch's kernel.
class LayerNormImpl : public torch::nn::LayerNormImpl {
 public:
  using torch::nn::LayerNormImpl::LayerNormImpl;
  /// Same shape as x.
  at::Tensor forward(const at::Tensor& x);
  /// A deep copy.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override;
};
/// Holder of LayerNormImpl: `nn::LayerNorm norm(torch::nn::LayerNormOptions({512}))`.
TORCH_MODULE(LayerNorm);

/// A table of vectors. Constructors are torch's. max_norm, sparse and scale_grad_by_freq use
/// torch's kernel.
class EmbeddingImpl : public torch::nn::EmbeddingImpl {
 public:
  using torch::nn::EmbeddingImpl::EmbeddingImpl;
  /// [..] → [.., dim].
  at::Tensor forward(const at::Tensor& ids);
  /// A deep copy.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override;
};
/// Holder of EmbeddingImpl: `nn::Embedding table(32000, 512)`.
TORCH_MODULE(Embedding);

/// x / sqrt(mean(x²) + eps) · weight over the last dimension. torch::nn has none in C++.
class RMSNormImpl : public torch::nn::Cloneable<RMSNormImpl> {
 public:
  /// `dim`: size of the last dimension.
  explicit RMSNormImpl(int64_t dim, double eps = 1e-5);
  /// Registers the weight; Cloneable calls it.
  void reset() override;
  /// Fills the weight with one.
  void reset_parameters();
  /// Same shape as x.
  at::Tensor forward(const at::Tensor& x);
  /// Prints its name and settings.
  void pretty_print(std::ostream& stream) const override;

  /// Added under the root.
  double eps() const { return eps_; }

  at::Tensor weight;  ///< [dim].

 private:
  int64_t dim_;
  double eps_;
};
/// Holder of RMSNormImpl: `nn::RMSNorm norm(512)`.
TORCH_MODULE(RMSNorm);

}  // namespace fsdp::nn
