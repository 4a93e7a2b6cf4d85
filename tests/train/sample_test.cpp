// Drawing tokens, compared with the distribution that the options define.
#include <gtest/gtest.h>

#include <torch/torch.h>

#include "fsdp/error.h"
#include "fsdp/models.h"
#include "train/sample.h"

namespace fsdp::train {
namespace {

std::vector<double> frequencies(const at::Tensor& logits, const SampleOptions& options, int draws) {
  at::Generator random = at::detail::createCPUGenerator(3);
  std::vector<double> counts(logits.numel());
  for (int i = 0; i < draws; ++i) counts[draw(logits, options, random)] += 1.0 / draws;
  return counts;
}

void expect_frequencies(const std::vector<double>& seen, const std::vector<double>& expected) {
  for (size_t i = 0; i < seen.size(); ++i) {
    if (expected[i] == 0)
      EXPECT_EQ(seen[i], 0) << i;
    else
      EXPECT_NEAR(seen[i], expected[i], 0.04) << i;
  }
}

const std::vector<double> kChances = {0.5, 0.3, 0.15, 0.05};
at::Tensor logits() {
  return torch::tensor(kChances, torch::kDouble).log().to(torch::kFloat) + 3.0;
}

TEST(Draw, FollowsTheModel) {
  expect_frequencies(frequencies(logits(), {.temperature = 1}, 3000), kChances);
}

TEST(Draw, ATemperatureSharpens) {
  std::vector<double> sharp;
  double sum = 0;
  for (double chance : kChances) sum += chance * chance;
  for (double chance : kChances) sharp.push_back(chance * chance / sum);
  expect_frequencies(frequencies(logits(), {.temperature = 0.5}, 3000), sharp);
  expect_frequencies(frequencies(logits(), {.temperature = 0}, 20), {1, 0, 0, 0});
}

TEST(Draw, TopKAndTopPKeepTheLikeliest) {
  expect_frequencies(frequencies(logits(), {.temperature = 1, .top_k = 2}, 3000),
                     {0.625, 0.375, 0, 0});
  expect_frequencies(frequencies(logits(), {.temperature = 1, .top_k = 9}, 3000), kChances);
  // 0.5 alone is less than 0.6, so the second stays too.
  expect_frequencies(frequencies(logits(), {.temperature = 1, .top_p = 0.6}, 3000),
                     {0.625, 0.375, 0, 0});
  expect_frequencies(frequencies(logits(), {.temperature = 1, .top_p = 0.01}, 20), {1, 0, 0, 0});
}

TEST(Draw, LogitsThatAreNotFiniteAreAnError) {
  at::Generator random = at::detail::createCPUGenerator(1);
  at::Tensor bad = torch::full({4}, std::numeric_limits<float>::quiet_NaN());
  EXPECT_THROW(draw(bad, {.temperature = 1}, random), Error);
}

TEST(Draw, OptionsOutOfRangeAreNamed) {
  for (SampleOptions wrong : {SampleOptions{.temperature = -1}, SampleOptions{.top_k = -1},
                              SampleOptions{.top_p = 0}, SampleOptions{.tokens = -1}})
    EXPECT_THROW(check(wrong), Error);
}

// Greedy generation equals choosing the most likely next token of the whole text, without a cache.
TEST(GenerateText, TheCacheChangesNothing) {
  torch::manual_seed(5);
  models::Llama model(
      models::LlamaConfig{.vocab = 40, .dim = 32, .layers = 2, .heads = 4, .kv_heads = 2});
  std::vector<int64_t> prompt = {1, 2, 3}, text = prompt, made;
  generate(*model, torch::kCPU, prompt, {.temperature = 0, .tokens = 12}, [&](int64_t token) {
    made.push_back(token);
    return true;
  });
  torch::NoGradGuard no_grad;
  model->eval();
  for (int i = 0; i < 12; ++i) {
    at::Tensor ids = torch::tensor(text, torch::kLong).unsqueeze(0);
    text.push_back(model->logits({.ids = ids}).select(1, -1).argmax().item<int64_t>());
  }
  EXPECT_EQ(made, std::vector<int64_t>(text.begin() + 3, text.end()));
}

TEST(GenerateText, StopsWhereAskedAndAtTheLastPosition) {
  models::GPT2 model(
      models::GPT2Config{.vocab = 20, .max_tokens = 8, .dim = 16, .layers = 1, .heads = 2});
  model->train();
  int count = 0;
  generate(*model, torch::kCPU, {1}, {.tokens = 100}, [&](int64_t) { return ++count < 3; });
  EXPECT_EQ(count, 3);
  count = 0;
  generate(*model, torch::kCPU, {1, 2, 3}, {.tokens = 100}, [&](int64_t) { return ++count > 0; });
  EXPECT_EQ(count, 6);  // positions 3 to 7, and one after the last
  count = 0;
  generate(*model, torch::kCPU, std::vector<int64_t>(30, 2), {.tokens = 5},
           [&](int64_t) { return ++count > 0; });
  EXPECT_EQ(count, 1);  // a prompt that is too long keeps its end
  EXPECT_TRUE(model->is_training());
}

}  // namespace
}  // namespace fsdp::train
