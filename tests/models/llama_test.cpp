// The models of src/models against their formulas, written out in double precision without any
// tensor operation.
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include <cmath>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "fsdp/error.h"
#include "fsdp/models.h"

namespace fsdp::models {
namespace {

// --- the reference: vectors of doubles, one sequence ---

using Row = std::vector<double>;
using Rows = std::vector<Row>;  // [tokens][elements]

struct Weights {
  std::map<std::string, at::Tensor> by_name;  // in double

  explicit Weights(const torch::nn::Module& module) {
    for (const auto& item : module.named_parameters())
      by_name[item.key()] = item.value().detach().to(at::kDouble).contiguous();
  }
  Row row(const std::string& name, int64_t index) const {
    const at::Tensor& matrix = by_name.at(name);
    const double* from = matrix.const_data_ptr<double>() + index * matrix.size(-1);
    return Row(from, from + matrix.size(-1));
  }
};

double dot(const Row& a, const Row& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

Rows linear(const Weights& weights, const std::string& name, const Rows& x) {
  int64_t out = weights.by_name.at(name).size(0);
  Rows y(x.size(), Row(out));
  for (int64_t o = 0; o < out; ++o) {
    Row w = weights.row(name, o);
    for (size_t t = 0; t < x.size(); ++t) y[t][o] = dot(w, x[t]);
  }
  return y;
}

Rows rms_norm(const Weights& weights, const std::string& name, const Rows& x, double eps) {
  Row w = weights.row(name, 0);
  Rows y = x;
  for (Row& row : y) {
    double scale = 1.0 / std::sqrt(dot(row, row) / static_cast<double>(row.size()) + eps);
    for (size_t i = 0; i < row.size(); ++i) row[i] *= scale * w[i];
  }
  return y;
}

// One head of one token, rotated by its position.
Row rotated(const Row& x, size_t position, double base) {
  size_t half = x.size() / 2;
  Row y(x.size());
  for (size_t i = 0; i < half; ++i) {
    double angle = static_cast<double>(position) *
                   std::pow(base, -2.0 * static_cast<double>(i) / static_cast<double>(x.size()));
    y[i] = x[i] * std::cos(angle) - x[i + half] * std::sin(angle);
    y[i + half] = x[i + half] * std::cos(angle) + x[i] * std::sin(angle);
  }
  return y;
}

Rows attention(const Weights& weights, const std::string& name, const Rows& x,
               const LlamaConfig& config) {
  Rows q = linear(weights, name + ".q_proj.weight", x),
       k = linear(weights, name + ".k_proj.weight", x),
       v = linear(weights, name + ".v_proj.weight", x);
  size_t width = config.dim / config.heads;
  auto part = [&](const Row& row, int64_t head) {
    return Row(row.begin() + head * width, row.begin() + (head + 1) * width);
  };
  Rows mixed(x.size(), Row(config.dim));
  for (int64_t head = 0; head < config.heads; ++head) {
    int64_t shared = head / (config.heads / config.kv_heads);
    for (size_t t = 0; t < x.size(); ++t) {
      Row query = rotated(part(q[t], head), t, config.rope_base), shares(t + 1);
      for (size_t s = 0; s <= t; ++s) {
        Row key = rotated(part(k[s], shared), s, config.rope_base);
        shares[s] = std::exp(dot(query, key) / std::sqrt(static_cast<double>(width)));
      }
      double sum = std::accumulate(shares.begin(), shares.end(), 0.0);
      for (size_t s = 0; s <= t; ++s)
        for (size_t i = 0; i < width; ++i)
          mixed[t][head * width + i] += shares[s] / sum * part(v[s], shared)[i];
    }
  }
  return linear(weights, name + ".o_proj.weight", mixed);
}

Rows feed_forward(const Weights& weights, const std::string& name, const Rows& x) {
  Rows gate = linear(weights, name + ".gate_proj.weight", x),
       up = linear(weights, name + ".up_proj.weight", x);
  for (size_t t = 0; t < x.size(); ++t)
    for (size_t i = 0; i < gate[t].size(); ++i)
      gate[t][i] = gate[t][i] / (1.0 + std::exp(-gate[t][i])) * up[t][i];
  return linear(weights, name + ".down_proj.weight", gate);
}

void add(Rows& x, const Rows& y) {
  for (size_t t = 0; t < x.size(); ++t)
    for (size_t i = 0; i < x[t].size(); ++i) x[t][i] += y[t][i];
}

Rows reference_logits(const Llama& model, const std::vector<int64_t>& ids) {
  const LlamaConfig& config = model->config();
  Weights weights(*model);
  Rows x;
  for (int64_t id : ids) x.push_back(weights.row("model.embed_tokens.weight", id));
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    std::string name = "model.layers." + std::to_string(layer);
    double eps = config.norm_eps;
    add(x, attention(weights, name + ".self_attn",
                     rms_norm(weights, name + ".input_layernorm.weight", x, eps), config));
    add(x, feed_forward(weights, name + ".mlp",
                        rms_norm(weights, name + ".post_attention_layernorm.weight", x, eps)));
  }
  return linear(weights, "lm_head.weight",
                rms_norm(weights, "model.norm.weight", x, config.norm_eps));
}

double reference_loss(const Rows& logits, const std::vector<int64_t>& targets) {
  double sum = 0;
  for (size_t t = 0; t < logits.size(); ++t) {
    double total = 0;
    for (double score : logits[t]) total += std::exp(score);
    sum += std::log(total) - logits[t][targets[t]];
  }
  return sum / static_cast<double>(logits.size());
}

// --- comparisons ---

// Weights large enough for every part to matter: the initial 0.02 hides mistakes.
Llama small(int64_t kv_heads = 2) {
  torch::manual_seed(3);
  Llama model(LlamaConfig{.vocab = 31,
                          .dim = 24,
                          .layers = 2,
                          .heads = 4,
                          .kv_heads = kv_heads,
                          .ffn = 40,
                          .init_std = 0.3});
  torch::NoGradGuard no_grad;
  for (auto& item : model->named_parameters())
    if (item.value().dim() == 1) item.value().uniform_(0.5, 1.5);
  return model;
}

at::Tensor sequence(const std::vector<int64_t>& ids) {
  return at::tensor(ids, at::kLong).unsqueeze(0);
}

TEST(Llama, LogitsAndLossAreThoseOfTheFormulas) {
  std::vector<int64_t> ids = {3, 30, 7, 7, 0, 12, 19}, targets = {30, 7, 7, 0, 12, 19, 4};
  for (int64_t kv_heads : {4, 2, 1}) {
    Llama model = small(kv_heads);
    Rows expected = reference_logits(model, ids);
    at::Tensor logits = model->logits({.ids = sequence(ids)}).detach().to(at::kDouble);
    ASSERT_EQ(logits.sizes(), (std::vector<int64_t>{1, 7, 31}));
    for (size_t t = 0; t < ids.size(); ++t)
      for (int64_t i = 0; i < 31; ++i)
        ASSERT_NEAR(logits[0][t][i].item<double>(), expected[t][i], 2e-5)
            << kv_heads << " kv heads, token " << t << ", score " << i;
    double loss = model->forward(sequence(ids), sequence(targets)).item<double>();
    EXPECT_NEAR(loss, reference_loss(expected, targets), 1e-5);
  }
}

TEST(Llama, GradientsAreThoseOfFiniteDifferences) {
  Llama model = small();
  model->to(at::kDouble);
  at::Tensor ids = sequence({3, 30, 7, 7, 0}), targets = sequence({30, 7, 7, 0, 12});
  auto loss = [&] {  // in double throughout, so that small differences show
    at::Tensor scores = model->logits({.ids = ids})[0];
    return -scores.log_softmax(-1).gather(-1, targets[0].unsqueeze(-1)).mean();
  };
  loss().backward();
  torch::NoGradGuard no_grad;
  for (auto& item : model->named_parameters()) {
    at::Tensor flat = item.value().view(-1);
    int64_t at = flat.numel() / 3;
    if (item.key() == "model.embed_tokens.weight") at = 7 * 24;  // a token that occurs
    double step = 1e-5, before = flat[at].item<double>();
    flat[at] = before + step;
    double up = loss().item<double>();
    flat[at] = before - step;
    double down = loss().item<double>();
    flat[at] = before;
    EXPECT_NEAR(item.value().grad().view(-1)[at].item<double>(), (up - down) / (2 * step), 1e-8)
        << item.key();
  }
}

TEST(Llama, ParameterCountIsTheFormula) {
  for (const LlamaConfig& config :
       {LlamaConfig{.vocab = 31, .dim = 24, .layers = 3, .heads = 4, .kv_heads = 2, .ffn = 40},
        LlamaConfig{.vocab = 64, .dim = 32, .layers = 1, .heads = 4}}) {
    Llama model(config);
    int64_t sum = 0;
    for (const at::Tensor& parameter : model->parameters()) sum += parameter.numel();
    EXPECT_EQ(parameter_count(config), sum);
  }
  EXPECT_EQ(parameter_count(LlamaConfig{.vocab = 4096, .dim = 384, .layers = 6, .heads = 6}),
            13'767'552);
  EXPECT_EQ(checked(LlamaConfig{.dim = 384, .heads = 6}).ffn, 1024);
}

TEST(Llama, StartsAtTheLossOfGuessing) {
  torch::manual_seed(0);
  Llama model(LlamaConfig{.vocab = 512, .dim = 64, .layers = 2, .heads = 4});
  at::Tensor data = at::randint(0, 512, {4, 65}, at::kLong);
  double loss = model->forward(data.slice(1, 0, 64), data.slice(1, 1)).item<double>();
  EXPECT_NEAR(loss, std::log(512.0), 0.1);
}

TEST(Llama, MatricesStartWithInitStdAndNormsAtOne) {
  Llama model(LlamaConfig{.vocab = 256, .dim = 64, .layers = 1, .heads = 4, .init_std = 0.05});
  for (const auto& item : model->named_parameters()) {
    if (item.value().dim() == 1)
      EXPECT_TRUE(at::equal(item.value(), at::ones_like(item.value()))) << item.key();
    else
      EXPECT_NEAR(item.value().std().item<double>(), 0.05, 0.004) << item.key();
  }
}

TEST(Llama, ALaterTokenChangesNoEarlierScore) {
  torch::NoGradGuard no_grad;
  Llama model = small();
  at::Tensor before = model->logits({.ids = sequence({3, 30, 7, 7, 0, 12})});
  at::Tensor after = model->logits({.ids = sequence({3, 30, 7, 7, 1, 12})});
  EXPECT_TRUE(at::allclose(before.slice(1, 0, 4), after.slice(1, 0, 4), 0, 1e-6));
  for (int64_t t : {4, 5}) EXPECT_FALSE(at::allclose(before[0][t], after[0][t], 0, 1e-3)) << t;
}

TEST(Llama, SequencesOfABatchDoNotMix) {
  torch::NoGradGuard no_grad;
  Llama model = small();
  at::Tensor both = at::tensor({1, 2, 3, 4, 9, 8, 7, 6}, at::kLong).view({2, 4});
  at::Tensor together = model->logits({.ids = both});
  for (int64_t i : {0, 1})
    EXPECT_TRUE(
        at::allclose(together[i], model->logits({.ids = both.slice(0, i, i + 1)})[0], 0, 1e-5));
}

TEST(Llama, TrainsAfterAForwardInInferenceMode) {
  Llama model = small();
  at::Tensor ids = sequence({1, 2, 3}), targets = sequence({2, 3, 4});
  {
    c10::InferenceMode inference;
    model->logits({.ids = ids});
  }
  model->forward(ids, targets).backward();
  for (const auto& item : model->named_parameters())
    EXPECT_TRUE(item.value().grad().defined()) << item.key();
}

TEST(Llama, HasParametersButNoBuffers) {
  Llama model = small();
  model->logits({.ids = sequence({1, 2})});
  EXPECT_TRUE(model->buffers().empty());
  auto names = model->named_parameters().keys();
  EXPECT_EQ(names[0], "model.embed_tokens.weight");
  EXPECT_EQ(names[2], "model.layers.0.self_attn.q_proj.weight");
  EXPECT_EQ(names.back(), "lm_head.weight");
}

TEST(Llama, RefusesInvalidNumbers) {
  EXPECT_THROW(Llama(LlamaConfig{.dim = 30, .heads = 4}), Error);                 // no whole heads
  EXPECT_THROW(Llama(LlamaConfig{.dim = 12, .heads = 4}), Error);                 // no pairs
  EXPECT_THROW(Llama(LlamaConfig{.dim = 64, .heads = 4, .kv_heads = 3}), Error);  // no groups
  EXPECT_THROW(Llama(LlamaConfig{.vocab = 0}), Error);
}

TEST(Rotary, TurnsPairsByPositionTimesFrequency) {
  torch::manual_seed(5);
  at::Tensor x = at::randn({2, 3, 9, 10});  // [batch, heads, tokens, head_dim]
  at::Tensor turned = rotate(x, rotary_tables(9, 10, 10000, at::kCPU)).to(at::kDouble);
  at::Tensor plain = x.to(at::kDouble).contiguous();
  for (int64_t b = 0; b < 2; ++b)
    for (int64_t h = 0; h < 3; ++h)
      for (int64_t t = 0; t < 9; ++t) {
        const double* from = plain[b][h][t].const_data_ptr<double>();
        Row expected = rotated(Row(from, from + 10), t, 10000);
        for (int64_t i = 0; i < 10; ++i)
          ASSERT_NEAR(turned[b][h][t][i].item<double>(), expected[i], 2e-6) << t << " " << i;
      }
}

TEST(Mlp, LossIsThatOfTheFormula) {
  torch::manual_seed(1);
  MLP model(MLPConfig{.width = 12, .layers = 8});
  at::Tensor x = at::randn({1, 12}), targets = at::randn({1, 12});
  Weights weights(*model);
  Rows rows = {Row(12)};
  for (int64_t i = 0; i < 12; ++i) rows[0][i] = x[0][i].item<double>();
  for (int64_t layer = 0; layer < 8; ++layer) {
    std::string name = "layers." + std::to_string(2 * layer);  // with a ReLU in between
    rows = linear(weights, name + ".weight", rows);
    add(rows, {weights.row(name + ".bias", 0)});
    if (layer < 7)
      for (double& value : rows[0]) value = std::max(0.0, value);
  }
  double expected = 0;
  for (int64_t i = 0; i < 12; ++i)
    expected += std::pow(rows[0][i] - targets[0][i].item<double>(), 2) / 12;
  EXPECT_NEAR(model->forward(x, targets).item<double>(), expected, 1e-6);
  int64_t sum = 0;
  for (const at::Tensor& parameter : model->parameters()) sum += parameter.numel();
  EXPECT_EQ(parameter_count(MLPConfig{.width = 12}), sum);
  EXPECT_EQ(model->flops_per_row(), 6 * 8 * 12 * 12);
}

}  // namespace
}  // namespace fsdp::models
