// MLP: linears of one width with ReLU between them. Parameters: layers.0.weight, layers.0.bias,
// layers.2.weight, … (a ReLU lies between). The units of sharding are nn::Linear, which is
// found as torch::nn::Linear too.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

namespace fsdp::models {

struct MLPConfig {
  int64_t width = 2048;
  int64_t layers = 8;
};
MLPConfig checked(MLPConfig config);  // an Error where it has no linear
int64_t parameter_count(const MLPConfig& config);

class MLPImpl : public torch::nn::Module {
 public:
  explicit MLPImpl(const MLPConfig& config = {});

  // Mean squared error. x, targets: [batch, width]
  at::Tensor forward(const at::Tensor& x, const at::Tensor& targets);
  at::Tensor predict(const at::Tensor& x);

  const MLPConfig& config() const { return config_; }
  double flops_per_row() const;  // of forward and backward: 6 for each weight

  torch::nn::Sequential layers;

 private:
  MLPConfig config_;
};
TORCH_MODULE(MLP);

}  // namespace fsdp::models
