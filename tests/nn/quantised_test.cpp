// Quantised linears against the same linears with the restored weights: results, gradients, all
// decoders with adapters, copies, and what is refused.
#include "fsdp/nn/quantised.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/utils.h>

#include "fsdp/error.h"
#include "fsdp/models.h"
#include "fsdp/nn.h"
#include "kernels/quantised.h"

namespace fsdp::nn {
namespace {

constexpr Quant kQuants[] = {Quant::kNf4, Quant::kNf4Double, Quant::kInt8};

// Gives each quantised linear of `to` the restored weight as its own.
void restore(torch::nn::Module& from, torch::nn::Module& to) {
  torch::NoGradGuard no_grad;
  for (const auto& item : from.named_modules()) {
    const auto* linear = item.value()->as<LinearImpl>();
    if (!linear || linear->quant() == Quant::kNone) continue;
    to.named_modules()[item.key()]->as<LinearImpl>()->weight.copy_(
        kernels::dequantise(linear->weight, linear->quant(), at::kFloat));
  }
}

TEST(QuantisedLinears, ComputeWithTheRestoredWeight) {
  for (Quant quant : kQuants)
    for (auto type : {at::kFloat, at::kBFloat16}) {
      torch::manual_seed(3);
      const at::Tensor weights[] = {at::randn({40, 128}), at::randn({24, 128})};
      const auto bias = [&](int64_t width) { return at::randn({width}).to(type).requires_grad_(); };
      const std::vector<at::Tensor> biases = {bias(40), bias(24)};
      at::Tensor x = at::randn({2, 5, 128}).to(type).requires_grad_();
      const at::Tensor gradient = at::randn({2, 5, 64}).to(type);
      std::vector<at::Tensor> bytes, numbers;
      for (const at::Tensor& weight : weights) {
        bytes.push_back(kernels::quantise(weight, quant));
        numbers.push_back(kernels::dequantise(bytes.back(), quant, type));
      }
      const auto run = [&](const at::Tensor& out) {
        out.backward(gradient);
        std::vector<at::Tensor> made{out.detach(), x.grad(), biases[0].grad(), biases[1].grad()};
        for (at::Tensor leaf : {x, biases[0], biases[1]}) leaf.mutable_grad() = at::Tensor();
        return made;
      };
      const auto ours = run(quantised_linears(x, bytes, biases, quant));
      const auto theirs = run(at::cat(
          {at::linear(x, numbers[0], biases[0]), at::linear(x, numbers[1], biases[1])}, -1));
      const double close = type == at::kFloat ? 1e-5 : 2e-2;
      for (size_t i = 0; i < ours.size(); ++i)
        EXPECT_TRUE(at::allclose(ours[i].to(at::kFloat), theirs[i].to(at::kFloat), close,
                                 close * theirs[i].abs().max().item<double>()))
            << i << " " << type;
    }
}

TEST(QuantisedLinears, EveryDecoderTrainsItsAdaptersBesideThem) {
  using enum models::Family;
  for (models::Family family : {kLlama, kQwen2, kQwen3, kSmolLM3, kOlmo2, kPhi3, kGemma3}) {
    const auto make = [&](bool quantised) {
      torch::manual_seed(5);
      models::Decoder model(models::of_family(
          family, {.vocab = 31, .dim = 64, .layers = 2, .heads = 2, .ffn = 128, .init_std = 0.1}));
      add_lora(*model, {.rank = 3, .where = [](const std::string& name) {
                          return !name.ends_with("o_proj") && !name.ends_with("1.mlp.up_proj");
                        }});
      torch::NoGradGuard no_grad;
      for (const auto& item : model->named_parameters())
        if (is_adapter(item.key())) item.value().normal_(0, 0.1);
      if (!quantised) return model;
      for (const QuantisedLinear& linear : quantise_linears(*model))
        EXPECT_EQ(linear.why_not, "") << linear.name;
      return model;
    };
    auto ours = make(true), theirs = make(false);
    restore(*ours, *theirs);
    const at::Tensor ids = at::arange(16).view({2, 8}), targets = ids + 1;
    at::Tensor losses[2];
    int at = 0;
    for (auto& model : {ours, theirs}) {
      models::Decoder one = model;
      losses[at] = one->forward(ids, targets);
      losses[at++].backward();
    }
    EXPECT_NEAR(losses[0].item<double>(), losses[1].item<double>(), 1e-5);
    const auto expected = theirs->named_parameters();
    for (const auto& item : ours->named_parameters()) {
      EXPECT_EQ(item.value().requires_grad(), is_adapter(item.key())) << item.key();
      if (!is_adapter(item.key())) continue;
      const at::Tensor own = item.value().grad(), other = expected[item.key()].grad();
      EXPECT_LT((own - other).norm().item<double>(), 1e-4 * other.norm().item<double>() + 1e-8)
          << item.key();
    }
  }
}

TEST(QuantisedLinears, KeepLessThanAByteForTwoNumbers) {
  Linear linear(torch::nn::LinearOptions(4096, 64).bias(false));
  linear->quantise(Quant::kNf4Double);
  EXPECT_EQ(linear->weight.scalar_type(), at::kByte);
  EXPECT_LT(static_cast<double>(linear->weight.nbytes()), 0.52 * 64 * 4096);
  EXPECT_EQ(linear->named_parameters()["weight"].numel(), linear->weight.numel());
}

TEST(QuantisedLinears, ACopyIsQuantisedToo) {
  Linear linear(64, 5);
  add_lora(*linear, {.rank = 2});
  linear->quantise(Quant::kInt8);
  auto copy = std::dynamic_pointer_cast<LinearImpl>(linear->clone());
  const at::Tensor x = at::randn({3, 64});
  EXPECT_TRUE(at::equal(copy->forward(x), linear(x)));
  EXPECT_EQ(copy->quant(), Quant::kInt8);
  EXPECT_FALSE(copy->weight.is_same(linear->weight));
}

TEST(QuantisedLinears, OthersStayAsTheyAre) {
  torch::nn::Sequential model(Linear(64, 8), Linear(65, 8), torch::nn::Linear(64, 8),
                              Linear(64, 8));
  const auto linears = quantise_linears(
      *model, {.quant = Quant::kNf4, .where = [](const std::string& name) { return name != "3"; }});
  ASSERT_EQ(linears.size(), 4);
  EXPECT_EQ(linears[0].why_not, "");
  EXPECT_NE(linears[1].why_not.find("multiple of 64"), std::string::npos);
  EXPECT_NE(linears[2].why_not.find("torch::nn::Linear"), std::string::npos);
  EXPECT_NE(linears[3].why_not.find("excluded"), std::string::npos);
  EXPECT_THROW(quantise_linears(*model[1]->as<LinearImpl>()), Error);
  EXPECT_THROW(model[0]->as<LinearImpl>()->quantise(Quant::kNf4), Error);  // again
  EXPECT_THROW(quantised_linears(at::ones({1, 64}), {}, {}, Quant::kNf4), Error);
}

}  // namespace
}  // namespace fsdp::nn
