/// @file
/// MLP: linears of one width with ReLU between them.
///
/// Parameters: layers.0.weight, layers.0.bias, layers.2.weight, … (a ReLU is between). Shard it by
/// nn::Linear, which torch::nn::Linear finds too.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <string>

#include "fsdp/init_parameters.h"

namespace fsdp::models {

/// The shape of an MLP.
struct MLPConfig {
  int64_t width = 2048;  ///< Width of every linear.
  int64_t layers = 8;    ///< Number of linears.
};
/// `config` itself. Throws Error if it has no linear.
MLPConfig checked(MLPConfig config);
/// Number of parameters.
int64_t parameter_count(const MLPConfig& config);

/// Linears with ReLU between them.
class MLPImpl : public torch::nn::Module {
 public:
  /// Initializes the weights.
  explicit MLPImpl(const MLPConfig& config = {});

  /// Mean squared error. x, targets [batch, width].
  at::Tensor forward(const at::Tensor& x, const at::Tensor& targets);
  /// [batch, width] → [batch, width].
  at::Tensor predict(const at::Tensor& x);

  /// The configuration.
  const MLPConfig& config() const { return config_; }
  /// Floating-point operations of forward and backward: 6 per weight.
  double flops_per_row() const;
  /// How a parameter starts: an InitRule for init_parameters().
  Distribution initial(const std::string& name, at::IntArrayRef sizes) const;

  torch::nn::Sequential layers;  ///< The linears and ReLUs.

 private:
  MLPConfig config_;
};
/// Holder of MLPImpl: `models::MLP model(config)`.
TORCH_MODULE(MLP);

}  // namespace fsdp::models
