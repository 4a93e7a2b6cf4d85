// Modules with the parameters, names, options and first weights of torch::nn's, and gradients that
// need no copy (nn/functional.h). Those of torch::nn that they derive from still find them:
// wrap::modules<torch::nn::Linear>() means both.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <optional>

namespace fsdp::nn {

class LinearImpl : public torch::nn::LinearImpl {
 public:
  using torch::nn::LinearImpl::LinearImpl;
  at::Tensor forward(const at::Tensor& x);  // [.., in] → [.., out]
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override;
};
TORCH_MODULE(Linear);

class LayerNormImpl : public torch::nn::LayerNormImpl {
 public:
  using torch::nn::LayerNormImpl::LayerNormImpl;
  at::Tensor forward(const at::Tensor& x);
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override;
};
TORCH_MODULE(LayerNorm);

class EmbeddingImpl : public torch::nn::EmbeddingImpl {
 public:
  using torch::nn::EmbeddingImpl::EmbeddingImpl;
  at::Tensor forward(const at::Tensor& ids);  // [..] → [.., dim]
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override;
};
TORCH_MODULE(Embedding);

// x / sqrt(mean(x²) + eps) · weight, over the last dimension. torch::nn has none in C++.
class RMSNormImpl : public torch::nn::Cloneable<RMSNormImpl> {
 public:
  explicit RMSNormImpl(int64_t dim, double eps = 1e-5);
  void reset() override;
  void reset_parameters();
  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& stream) const override;

  double eps() const { return eps_; }

  at::Tensor weight;  // [dim]

 private:
  int64_t dim_;
  double eps_;
};
TORCH_MODULE(RMSNorm);

}  // namespace fsdp::nn
