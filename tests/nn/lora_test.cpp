// Adapters against LoRA by hand in float64, and what add_lora() freezes, names and refuses.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/utils.h>

#include <set>
#include <string>

#include "fsdp/error.h"
#include "fsdp/models.h"
#include "fsdp/nn.h"

namespace fsdp::nn {
namespace {

torch::nn::Sequential two_linears() {
  return torch::nn::Sequential(Linear(6, 5), Linear(torch::nn::LinearOptions(5, 4).bias(false)));
}

std::set<std::string> trained(torch::nn::Module& module) {
  std::set<std::string> names;
  for (const auto& item : module.named_parameters())
    if (item.value().requires_grad()) names.insert(item.key());
  return names;
}

std::string refused(torch::nn::Module& module, const LoRAOptions& options) {
  try {
    add_lora(module, options);
  } catch (const Error& error) {
    return error.message();
  }
  return "";
}

TEST(LoRA, OnlyAdaptersAreTrainedAndTheFirstResultIsTheBases) {
  torch::nn::Sequential model = two_linears();
  const at::Tensor x = at::randn({3, 6}), before = model->forward(x);
  const auto names = add_lora(*model, {.rank = 2, .where = named_linears({"1"})});
  EXPECT_EQ(names, std::vector<std::string>{"1"});
  EXPECT_EQ(trained(*model), (std::set<std::string>{"1.lora_A.weight", "1.lora_B.weight"}));
  EXPECT_TRUE(at::equal(model->forward(x), before));
  for (const auto& item : model->named_parameters())
    EXPECT_EQ(is_adapter(item.key()), item.value().requires_grad()) << item.key();
}

TEST(LoRA, AddsTheScaledProduct) {
  const auto in64 = [](const at::Tensor& tensor) { return tensor.to(at::kDouble); };
  for (bool rslora : {false, true}) {
    torch::nn::Sequential model = two_linears();
    add_lora(*model, {.rank = 4, .alpha = 6, .rslora = rslora});
    torch::NoGradGuard no_grad;
    const at::Tensor x = at::randn({2, 3, 6});
    at::Tensor expected = in64(x);
    for (size_t i = 0; i < 2; ++i) {
      const auto& linear = *model[i]->as<LinearImpl>();
      linear.lora_B->weight.normal_();
      const at::Tensor product = in64(linear.lora_B->weight).matmul(in64(linear.lora_A->weight));
      const at::Tensor weight = in64(linear.weight) + (rslora ? 3.0 : 1.5) * product;
      expected = expected.matmul(weight.t());
      if (linear.bias.defined()) expected = expected + in64(linear.bias);
    }
    EXPECT_TRUE(at::allclose(in64(model->forward(x)), expected, 1e-5, 1e-6));
  }
}

TEST(LoRA, TheBaseCanBeComputedAlone) {
  models::Decoder model(models::DecoderConfig{.vocab = 11, .dim = 16, .layers = 2, .heads = 2});
  const at::Tensor ids = at::arange(8).view({1, 8});
  torch::NoGradGuard no_grad;
  const at::Tensor before = model->logits({.ids = ids});
  add_lora(*model, {.rank = 2});
  for (const auto& item : model->named_parameters())
    if (is_adapter(item.key())) item.value().normal_();
  const at::Tensor adapted = model->logits({.ids = ids});
  {
    const WithoutAdapters without(*model);
    const WithoutAdapters again(*model);
    EXPECT_TRUE(at::equal(model->logits({.ids = ids}), before));
  }
  EXPECT_FALSE(at::equal(adapted, before));
  EXPECT_TRUE(at::equal(model->logits({.ids = ids}), adapted));
}

TEST(LoRA, DropoutIsForTraining) {
  Linear linear(8, 8);
  add_lora(*linear, {.rank = 8, .alpha = 8, .dropout = 0.5});
  torch::NoGradGuard no_grad;
  linear->lora_B->weight.normal_();
  const at::Tensor x = at::ones({4, 8});
  EXPECT_FALSE(at::equal(linear(x), linear(x)));
  linear->eval();
  EXPECT_TRUE(at::equal(linear(x), linear(x)));
}

TEST(LoRA, ACopyHasItsOwnAdapter) {
  Linear linear(6, 5);
  add_lora(*linear, {.rank = 2});
  torch::NoGradGuard no_grad;
  linear->lora_B->weight.normal_();
  auto copy = std::dynamic_pointer_cast<LinearImpl>(linear->clone());
  const at::Tensor x = at::randn({3, 6}), expected = linear(x);
  EXPECT_EQ(trained(*copy), trained(*linear));
  linear->lora_B->weight.zero_();
  EXPECT_TRUE(at::equal(copy->forward(x), expected));
}

// Fused layers of a decoder, with adapters on some: each must act as if it were in the weight.
TEST(LoRA, EveryDecoderAddsItBesideFusedLayers) {
  using enum models::Family;
  for (models::Family family : {kLlama, kQwen2, kQwen3, kSmolLM3, kOlmo2, kPhi3, kGemma3}) {
    torch::manual_seed(5);
    models::Decoder model(models::of_family(
        family, {.vocab = 31, .dim = 16, .layers = 2, .heads = 2, .ffn = 24, .init_std = 0.3}));
    add_lora(*model, {.rank = 3, .alpha = 2, .where = [](const std::string& name) {
                        return !name.ends_with("k_proj") && !name.ends_with("up_proj");
                      }});
    const at::Tensor ids = at::randint(31, {2, 7}, at::kLong);
    torch::NoGradGuard no_grad;
    for (const auto& item : model->named_parameters())
      if (item.key().ends_with("lora_B.weight")) item.value().normal_(0, 0.5);
    const at::Tensor adapted = model->logits({.ids = ids});
    for (const auto& module : model->modules()) {
      auto* linear = module->as<LinearImpl>();
      if (!linear || !linear->has_adapter()) continue;
      linear->weight.add_(linear->lora_B->weight.matmul(linear->lora_A->weight), 2.0 / 3);
      linear->lora_B->weight.zero_();
    }
    const at::Tensor merged = model->logits({.ids = ids});
    EXPECT_LT((adapted - merged).abs().max().item<double>(),
              1e-4 * merged.abs().max().item<double>())
        << static_cast<int>(family);
  }
}

TEST(LoRA, AGpt2AddsItToTransposedWeights) {
  torch::manual_seed(5);
  models::GPT2 model(models::GPT2Config{
      .vocab = 31, .max_tokens = 8, .dim = 16, .layers = 2, .heads = 2, .init_std = 0.3});
  const auto names = add_lora(*model, {.rank = 3, .alpha = 2, .where = [](const std::string& name) {
                                         return !name.ends_with("1.mlp.c_proj");
                                       }});
  EXPECT_EQ(names.size(), 7);
  const at::Tensor ids = at::randint(31, {2, 7}, at::kLong);
  torch::NoGradGuard no_grad;
  for (const auto& item : model->named_parameters())
    if (item.key().ends_with("lora_B.weight")) item.value().normal_(0, 0.5);
  const at::Tensor adapted = model->logits({.ids = ids});
  const WithoutAdapters without(*model);
  for (const auto& module : model->modules()) {
    auto* conv = module->as<models::Conv1DImpl>();
    if (!conv || !conv->has_adapter()) continue;
    conv->weight.add_(conv->lora_B->weight.matmul(conv->lora_A->weight).t(), 2.0 / 3);
  }
  const at::Tensor merged = model->logits({.ids = ids});
  EXPECT_LT((adapted - merged).abs().max().item<double>(),
            1e-4 * merged.abs().max().item<double>());
}

TEST(LoRA, RefusesWhatCannotHaveAnAdapter) {
  torch::nn::Sequential model = two_linears();
  EXPECT_NE(refused(*model, {.rank = 0}).find("rank 0"), std::string::npos);
  EXPECT_NE(refused(*model, {.dropout = 1}).find("dropout"), std::string::npos);
  EXPECT_NE(refused(*model, {.where = named_linears({"q"})}).find("no linear"), std::string::npos);
  torch::nn::Sequential theirs(torch::nn::Linear(2, 2));
  EXPECT_NE(refused(*theirs, {}).find("torch::nn::Linear"), std::string::npos);
  EXPECT_EQ(refused(*model, {}), "");
  EXPECT_NE(refused(*model, {}).find("already"), std::string::npos);
}

}  // namespace
}  // namespace fsdp::nn
