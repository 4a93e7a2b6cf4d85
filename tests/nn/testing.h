// Shared by the tests of layers: the dtypes and devices they run on, and the comparison of a
// function, forward and backward, with the same in torch's operators in float64.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/utils.h>

#include <functional>
#include <string>
#include <vector>

#include "base/modules.h"
#include "fsdp/nn.h"

namespace fsdp::nn {

using Tensors = std::vector<at::Tensor>;
using Function = std::function<Tensors(const Tensors&)>;

// LibTorch looks for CUDA once, when the first test is seeded: the module is loaded before.
class CudaModule : public ::testing::Environment {
 public:
  void SetUp() override { find_library("cuda"); }
};
inline const auto* const kCudaModule = ::testing::AddGlobalTestEnvironment(new CudaModule);

inline bool has_cuda() {
  static const bool has = find_library("cuda") != nullptr && at::globalContext().hasCUDA();
  return has;
}

struct Setting {
  const char* name;
  at::ScalarType type;
  at::DeviceType device;
};

class Layers : public ::testing::TestWithParam<Setting> {
 protected:
  void SetUp() override {
    if (GetParam().device == at::kCUDA && !has_cuda()) GTEST_SKIP() << "needs a GPU";
    torch::manual_seed(11);
  }
  at::TensorOptions here() const {
    return at::TensorOptions().dtype(GetParam().type).device(GetParam().device);
  }
  // What rounding explains: each result is rounded once or twice.
  double tolerance(const at::Tensor& ours) const {
    bool half = GetParam().type == at::kBFloat16 || GetParam().type == at::kHalf;
    return half ? 1e-2 : ours.scalar_type() == at::kDouble ? 1e-10 : 1e-5;
  }

  void expect_near(const at::Tensor& ours, const at::Tensor& expected, const std::string& what) {
    ASSERT_TRUE(ours.defined()) << what;
    ASSERT_EQ(ours.sizes(), expected.sizes()) << what;
    at::Tensor difference = ours.to(at::kCPU, at::kDouble) - expected.to(at::kDouble);
    if (difference.numel() == 0) return;
    double scale = std::max(1e-6, expected.norm().item<double>());
    EXPECT_LE(difference.norm().item<double>(), tolerance(ours) * scale) << what;
    double largest = std::max(1e-6, expected.abs().max().item<double>());
    EXPECT_LE(difference.abs().max().item<double>(), 5 * tolerance(ours) * largest) << what;
  }

  // `inputs`: float64 on the CPU, rounded to the setting's dtype for both sides; integers stay.
  // Floating-point inputs that aren't in `frozen` get gradients.
  void compare(const Function& ours, const Function& plain, const Tensors& inputs,
               const std::vector<size_t>& frozen = {}) {
    Tensors mine, theirs;
    for (size_t i = 0; i < inputs.size(); ++i) {
      bool real = inputs[i].is_floating_point();
      bool wanted = real && std::find(frozen.begin(), frozen.end(), i) == frozen.end();
      at::Tensor rounded = real ? inputs[i].to(GetParam().type) : inputs[i];
      mine.push_back(rounded.clone().to(GetParam().device).set_requires_grad(wanted));
      theirs.push_back(
          (real ? rounded.to(at::kDouble).clone() : rounded).set_requires_grad(wanted));
    }
    Tensors results = ours(mine), expected = plain(theirs);
    ASSERT_EQ(results.size(), expected.size());
    Tensors ours_out, theirs_out, ours_grad, theirs_grad;
    for (size_t i = 0; i < results.size(); ++i) {
      expect_near(results[i].detach(), expected[i].detach(), "result " + std::to_string(i));
      if (!expected[i].requires_grad()) continue;
      at::Tensor gradient =
          at::randn(expected[i].sizes(), at::kDouble).to(results[i].scalar_type()).to(at::kDouble);
      ours_out.push_back(results[i]);
      theirs_out.push_back(expected[i]);
      ours_grad.push_back(gradient.to(results[i].options()));
      theirs_grad.push_back(gradient);
    }
    if (ours_out.empty()) return;
    torch::autograd::backward(ours_out, ours_grad);
    torch::autograd::backward(theirs_out, theirs_grad);
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!theirs[i].requires_grad()) {
        EXPECT_FALSE(mine[i].grad().defined()) << "input " << i;
        continue;
      }
      at::Tensor wanted = theirs[i].grad();
      if (!wanted.defined()) wanted = at::zeros_like(theirs[i]);
      at::Tensor got = mine[i].grad();
      if (!got.defined()) got = at::zeros_like(mine[i]);
      EXPECT_EQ(got.scalar_type(), GetParam().type) << "input " << i;
      expect_near(got, wanted, "gradient of input " + std::to_string(i));
    }
  }
};

inline std::vector<Setting> settings() {
  return {{"float64_cpu", at::kDouble, at::kCPU},    {"float32_cpu", at::kFloat, at::kCPU},
          {"bfloat16_cpu", at::kBFloat16, at::kCPU}, {"float16_cpu", at::kHalf, at::kCPU},
          {"float32_cuda", at::kFloat, at::kCUDA},   {"bfloat16_cuda", at::kBFloat16, at::kCUDA},
          {"float16_cuda", at::kHalf, at::kCUDA}};
}

inline std::string setting_name(const ::testing::TestParamInfo<Setting>& info) {
  return info.param.name;
}

inline at::Tensor random(at::IntArrayRef sizes, double scale = 1) {
  return scale * at::randn(sizes, at::kDouble);
}

}  // namespace fsdp::nn
