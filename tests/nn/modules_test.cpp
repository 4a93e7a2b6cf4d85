// The modules against torch::nn's: same parameters, same initial weights, same results.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/utils.h>

#include <sstream>
#include <string>

#include "fsdp/nn.h"
#include "fsdp/wrap.h"

namespace fsdp::nn {
namespace {

void expect_same_module(torch::nn::Module& ours, torch::nn::Module& theirs) {
  auto mine = ours.named_parameters(), expected = theirs.named_parameters();
  ASSERT_EQ(mine.keys(), expected.keys());
  for (const auto& item : expected)
    EXPECT_TRUE(at::equal(mine[item.key()], item.value())) << item.key();
}

// Both are built from one seed, then get the same input and gradient.
template <typename Ours, typename Theirs, typename Options>
void expect_drop_in(const Options& options, const at::Tensor& input) {
  torch::manual_seed(3);
  Ours ours(options);
  torch::manual_seed(3);
  Theirs theirs(options);
  expect_same_module(*ours, *theirs);
  at::Tensor mine = ours(input), expected = theirs(input);
  EXPECT_TRUE(at::allclose(mine, expected, 1e-5, 1e-6));
  at::Tensor gradient = at::randn(expected.sizes());
  mine.backward(gradient);
  expected.backward(gradient);
  auto parameters = ours->named_parameters();
  for (const auto& item : theirs->named_parameters())
    EXPECT_TRUE(at::allclose(parameters[item.key()].grad().to_dense(),
                             item.value().grad().to_dense(), 1e-5, 1e-5))
        << item.key();
  std::ostringstream text, same;
  text << *ours;
  same << *theirs;
  EXPECT_EQ(text.str(), same.str());
}

TEST(Modules, LinearIsTorchs) {
  at::Tensor x = at::randn({3, 4, 6});
  expect_drop_in<Linear, torch::nn::Linear>(torch::nn::LinearOptions(6, 5), x);
  expect_drop_in<Linear, torch::nn::Linear>(torch::nn::LinearOptions(6, 5).bias(false), x);
}

TEST(Modules, LayerNormIsTorchs) {
  at::Tensor x = at::randn({3, 4, 6});
  expect_drop_in<LayerNorm, torch::nn::LayerNorm>(torch::nn::LayerNormOptions({6}).eps(1e-3), x);
  expect_drop_in<LayerNorm, torch::nn::LayerNorm>(torch::nn::LayerNormOptions({4, 6}), x);
  torch::nn::LayerNormOptions plain({6});
  plain.elementwise_affine(false);
  EXPECT_TRUE(at::allclose(LayerNorm(plain)(x), torch::nn::LayerNorm(plain)(x)));
}

TEST(Modules, EmbeddingIsTorchs) {
  at::Tensor ids = at::randint(0, 7, {3, 4}, at::kLong);
  using Options = torch::nn::EmbeddingOptions;
  expect_drop_in<Embedding, torch::nn::Embedding>(Options(7, 5), ids);
  expect_drop_in<Embedding, torch::nn::Embedding>(Options(7, 5).padding_idx(2), ids);
  expect_drop_in<Embedding, torch::nn::Embedding>(Options(7, 5).scale_grad_by_freq(true), ids);
  expect_drop_in<Embedding, torch::nn::Embedding>(Options(7, 5).sparse(true), ids);
}

TEST(Modules, RmsNormBeginsAtOne) {
  RMSNorm norm(6, 1e-6);
  EXPECT_EQ(norm->eps(), 1e-6);
  EXPECT_TRUE(at::equal(norm->weight, at::ones({6})));
  at::Tensor x = at::randn({3, 6});
  EXPECT_TRUE(at::allclose(norm(x), at::rms_norm(x, {6}, norm->weight, 1e-6)));
}

TEST(Modules, ClonesAreOfTheSameKindAndOnTheirOwn) {
  Linear linear(3, 4);
  LayerNorm layer(torch::nn::LayerNormOptions({4}));
  Embedding embedding(5, 4);
  RMSNorm norm(4);
  for (const std::shared_ptr<torch::nn::Module>& module :
       {std::shared_ptr<torch::nn::Module>(linear.ptr()),
        std::shared_ptr<torch::nn::Module>(layer.ptr()),
        std::shared_ptr<torch::nn::Module>(embedding.ptr()),
        std::shared_ptr<torch::nn::Module>(norm.ptr())}) {
    auto copy = module->clone();
    EXPECT_EQ(copy->name(), module->name());
    expect_same_module(*copy, *module);
    torch::NoGradGuard no_grad;
    copy->parameters()[0].add_(1);
    EXPECT_FALSE(at::equal(copy->parameters()[0], module->parameters()[0]));
  }
}

TEST(Modules, StandInASequentialAndAreFoundByTorchsNames) {
  torch::nn::Sequential model(Linear(4, 8), torch::nn::ReLU(), Linear(8, 2), RMSNorm(2));
  EXPECT_EQ(model->forward(at::randn({3, 4})).sizes(), (std::vector<int64_t>{3, 2}));
  EXPECT_NE(model[0]->as<torch::nn::Linear>(), nullptr);
  auto copy = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(model->clone());
  expect_same_module(*copy, *model);
}

}  // namespace
}  // namespace fsdp::nn
