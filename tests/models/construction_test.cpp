// Construction of models: sizes, names and initial weights, with and without deferred_init, and the
// configurations that are refused.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include <cmath>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "fsdp/deferred_init.h"
#include "fsdp/error.h"
#include "fsdp/models.h"
#include "shard/deferred_oracle.h"

namespace fsdp::models {
namespace {

using Model = std::shared_ptr<CausalLMImpl>;

const LlamaConfig kLlama{.vocab = 48, .dim = 16, .layers = 2, .heads = 4, .kv_heads = 2};
const GPT2Config kGpt2{.vocab = 48, .max_tokens = 20, .dim = 16, .layers = 2, .heads = 4};

LlamaConfig tied(LlamaConfig config) {
  config.tied = true;
  return config;
}

DecoderConfig with(DecoderConfig config, const Mixture& mixture) {
  config.mixture = mixture;
  return config;
}

DecoderConfig no_rope(DecoderConfig config) {
  config.no_rope_every = 2;
  return config;
}

GPT2Config untied(GPT2Config config) {
  config.tied = false;
  return config;
}

struct BuildCase {
  const char* name;
  std::function<Model()> build;
  int64_t parameters;  // by parameter_count
};

std::vector<BuildCase> cases() {
  auto llama = [](const char* name, LlamaConfig config) {
    return BuildCase{name, [config] { return Llama(config).ptr(); }, parameter_count(config)};
  };
  auto gpt2 = [](const char* name, GPT2Config config) {
    return BuildCase{name, [config] { return GPT2(config).ptr(); }, parameter_count(config)};
  };
  LlamaConfig wide = kLlama;
  wide.head_dim = 6;
  return {llama("llama", kLlama),
          llama("llama_tied", tied(kLlama)),
          llama("llama_head_dim", wide),
          llama("qwen2", qwen2(kLlama)),
          llama("qwen2_tied", qwen2(tied(kLlama))),
          llama("qwen3", of_family(Family::kQwen3, wide)),
          llama("mistral", of_family(Family::kMistral, kLlama)),
          llama("smollm3", of_family(Family::kSmolLM3, no_rope(kLlama))),
          llama("olmo2", of_family(Family::kOlmo2, kLlama)),
          llama("phi3", of_family(Family::kPhi3, kLlama)),
          llama("gemma3", of_family(Family::kGemma3, tied(wide))),
          llama("mixtral", of_family(Family::kMixtral, kLlama)),
          llama("qwen3_moe", of_family(Family::kQwen3Moe, with(wide, {.top_k = 3, .ffn = 8}))),
          llama("olmoe", of_family(Family::kOlmoe, kLlama)),
          llama("dots1", of_family(Family::kDots1,
                                   with(kLlama, {.ffn = 8, .shared = 2, .dense_layers = 1}))),
          gpt2("gpt2", kGpt2),
          gpt2("gpt2_untied", untied(kGpt2))};
}

class Construction : public ::testing::TestWithParam<BuildCase> {};

INSTANTIATE_TEST_SUITE_P(Models, Construction, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(Construction, ParameterCountMatchesTheParameters) {
  int64_t sum = 0;
  std::set<void*> seen;
  for (const at::Tensor& parameter : GetParam().build()->parameters())
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) sum += parameter.numel();
  EXPECT_EQ(sum, GetParam().parameters);
}

TEST_P(Construction, DeferredInitGivesTheSameBits) {
  torch::manual_seed(11);
  Model plain = GetParam().build();
  at::Tensor after = shard::generator_state();
  torch::manual_seed(11);
  Model lazy = deferred_init(GetParam().build);
  EXPECT_TRUE(at::equal(shard::generator_state(), after));
  shard::Tensors expected = shard::tensors_of(*plain), deferred = shard::tensors_of(*lazy);
  shard::expect_same_handles(expected, deferred);
  for (size_t i = 0; i < expected.size(); ++i)
    shard::expect_same_bits(expected[i].second, deferred[i].second, expected[i].first);
}

TEST_P(Construction, BiasesStartAtZeroNormsAtOneMatricesWithInitStd) {
  torch::manual_seed(4);
  Model model = GetParam().build();
  const bool from_one = GetParam().name == std::string("gemma3");  // norms multiply by 1 + weight
  for (const auto& item : model->named_parameters()) {
    const auto& [name, value] = std::pair(item.key(), item.value());
    if (name.ends_with("bias") || (from_one && value.dim() == 1)) {
      EXPECT_EQ(value.abs().max().item<double>(), 0) << name;
    } else if (value.dim() == 1) {
      EXPECT_TRUE(at::equal(value, at::ones_like(value))) << name;
    } else {
      bool residual = name.ends_with("c_proj.weight");  // GPT-2: 2 layers add 4 of them
      double spread = residual ? 0.02 / 2 : 0.02;
      auto count = static_cast<double>(value.numel());
      EXPECT_NEAR(value.std().item<double>() / spread, 1, 4 / std::sqrt(2 * count)) << name;
      EXPECT_NEAR(value.mean().item<double>() / spread, 0, 4 / std::sqrt(count)) << name;
    }
  }
}

// The constructor draws what initial() says, in the order of the parameters, after its layers have
// drawn their own.
TEST_P(Construction, StartsAsItsDescriptionSays) {
  Model model = GetParam().build(), described = GetParam().build();
  std::set<void*> seen;
  torch::manual_seed(9);
  for (const auto& item : described->named_parameters())
    if (seen.insert(item.value().unsafeGetTensorImpl()).second)
      init_tensor_(item.value(), described->initial(item.key(), item.value().sizes()));
  for (const auto& item : described->named_parameters()) {
    const Distribution start = described->initial(item.key(), item.value().sizes());
    const double spread = start.kind == Distribution::Kind::kNormal ? start.b : 0;
    const at::Tensor& built = model->named_parameters()[item.key()];
    const auto count = static_cast<double>(built.numel());
    for (const at::Tensor& value : {built, item.value()}) {
      EXPECT_NEAR(value.mean().item<double>(), start.a, 4 * spread / std::sqrt(count))
          << item.key();
      EXPECT_NEAR(value.std().item<double>(), spread, 4 * spread / std::sqrt(2 * count))
          << item.key();
    }
  }
}

TEST_P(Construction, StartsAtTheLossOfGuessing) {
  torch::manual_seed(5);
  Model model = GetParam().build();
  at::Tensor data = at::randint(0, 48, {8, 21}, at::kLong);
  double loss = model->forward(data.slice(1, 0, 20), data.slice(1, 1)).item<double>();
  EXPECT_NEAR(loss, std::log(48.0), 0.1);
}

TEST_P(Construction, RunsInBf16CloseToFp32) {
  torch::manual_seed(6);
  Model model = GetParam().build();
  {
    torch::NoGradGuard no_grad;
    for (auto& parameter : model->parameters())
      if (parameter.dim() > 1) parameter.mul_(5);
  }
  at::Tensor ids = at::randint(0, 48, {2, 12}, at::kLong);
  at::Tensor exact = model->logits({.ids = ids}).detach();
  model->to(at::kBFloat16);
  at::Tensor rough = model->logits({.ids = ids});
  EXPECT_EQ(rough.scalar_type(), at::kBFloat16);
  double error = (rough.to(at::kFloat) - exact).norm().item<double>() / exact.norm().item<double>();
  EXPECT_LE(error, 0.03);
  at::Tensor loss = model->forward(ids, ids);
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  loss.backward();
  for (const auto& item : model->named_parameters())
    EXPECT_EQ(item.value().grad().scalar_type(), at::kBFloat16) << item.key();
}

// Those that a token goes to.
double share_of_experts(const CausalLMImpl& model) {
  const Mixture& mixture = model.as<Decoder>()->config().mixture.value();
  return static_cast<double>(mixture.top_k) / static_cast<double>(mixture.experts);
}

// An independent count: finds the matrices by name.
TEST_P(Construction, FlopsAreThoseOfTheMatricesAndHalfTheAttention) {
  Model model = GetParam().build();
  double products = 0, head_dims = 0;  // of one layer
  for (const auto& item : model->named_parameters()) {
    const std::string& name = item.key();
    bool lookup = name.ends_with("embed_tokens.weight") || name.ends_with("wte.weight") ||
                  name.ends_with("wpe.weight");
    const double share = name.find(".experts.") == std::string::npos ? 1 : share_of_experts(*model);
    if (item.value().dim() > 1 && !lookup)
      products += share * static_cast<double>(item.value().numel());
    if (name == "model.layers.0.self_attn.o_proj.weight")
      head_dims = static_cast<double>(item.value().size(1));
    if (name == "transformer.h.0.attn.c_proj.weight")
      head_dims = static_cast<double>(item.value().size(0));
  }
  for (int64_t tokens : {0, 10, 2048})
    EXPECT_DOUBLE_EQ(model->flops_per_token(tokens),
                     6 * products + 6.0 * 2 * head_dims * static_cast<double>(tokens));
}

TEST(Construction, AWindowCountsWhatItShows) {
  DecoderConfig config = of_family(Family::kMistral, kLlama);
  const double full = Decoder(config)->flops_per_token(0), each = 12.0 * config.dim;
  config.window = 3;
  config.layers = 1;
  // Of 5 tokens, in one layer: 0.5, 1.5, 2.5 and twice 3 keys, each without half of its last one.
  Decoder one(config);
  EXPECT_NEAR(one->flops_per_token(5) - one->flops_per_token(0), each * (4.5 + 6) / 5, 1e-6);
  EXPECT_NEAR(one->flops_per_token(3) - one->flops_per_token(0), each * 4.5 / 3, 1e-6);
  config.full_every = 2;
  config.layers = 2;
  Decoder both(config);
  EXPECT_EQ(both->flops_per_token(0), full);
  EXPECT_NEAR(both->flops_per_token(5) - full, each * ((4.5 + 6) / 5 + 2.5), 1e-6);
}

TEST(Construction, ATiedHeadIsOneParameterUnderTwoNames) {
  Llama llama(tied(kLlama));
  GPT2 gpt2(kGpt2);
  EXPECT_TRUE(llama->lm_head->weight.is_same(llama->model->embed_tokens->weight));
  EXPECT_TRUE(gpt2->lm_head->weight.is_same(gpt2->transformer->wte->weight));
  EXPECT_TRUE(llama->named_parameters().contains("lm_head.weight"));
  EXPECT_TRUE(llama->named_parameters().contains("model.embed_tokens.weight"));
  llama->to(at::kDouble);
  EXPECT_EQ(llama->lm_head->weight.scalar_type(), at::kDouble);
  EXPECT_TRUE(llama->lm_head->weight.is_same(llama->model->embed_tokens->weight));
}

TEST(Construction, PublishedModelsHaveTheirPublishedSizes) {
  auto llama3 = [](int64_t dim, int64_t layers, int64_t heads, int64_t ffn, bool tied) {
    return parameter_count(LlamaConfig{.vocab = 128256,
                                       .dim = dim,
                                       .layers = layers,
                                       .heads = heads,
                                       .kv_heads = 8,
                                       .ffn = ffn,
                                       .tied = tied});
  };
  EXPECT_EQ(llama3(2048, 16, 32, 8192, true), 1'235'814'400);
  EXPECT_EQ(llama3(3072, 28, 24, 8192, true), 3'212'749'824);
  EXPECT_EQ(llama3(4096, 32, 32, 14336, false), 8'030'261'248);
  EXPECT_EQ(llama3(8192, 80, 64, 28672, false), 70'553'706'496);
  EXPECT_EQ(parameter_count(qwen2({.vocab = 151936,
                                   .dim = 896,
                                   .layers = 24,
                                   .heads = 14,
                                   .kv_heads = 2,
                                   .ffn = 4864,
                                   .tied = true})),
            494'032'768);
  EXPECT_EQ(
      parameter_count(qwen2(
          {.vocab = 152064, .dim = 3584, .layers = 28, .heads = 28, .kv_heads = 4, .ffn = 18944})),
      7'615'616'512);
  EXPECT_EQ(parameter_count(GPT2Config{}), 124'439'808);
  auto of = [](Family family, DecoderConfig sizes) {
    return parameter_count(of_family(family, std::move(sizes)));
  };
  EXPECT_EQ(of(Family::kQwen3, {.vocab = 151936,
                                .dim = 1024,
                                .layers = 28,
                                .heads = 16,
                                .kv_heads = 8,
                                .head_dim = 128,
                                .ffn = 3072,
                                .tied = true}),
            596'049'920);
  EXPECT_EQ(
      of(Family::kMistral,
         {.vocab = 32000, .dim = 4096, .layers = 32, .heads = 32, .kv_heads = 8, .ffn = 14336}),
      7'241'732'096);
  EXPECT_EQ(of(Family::kSmolLM3, {.vocab = 128256,
                                  .dim = 2048,
                                  .layers = 36,
                                  .heads = 16,
                                  .kv_heads = 4,
                                  .ffn = 11008,
                                  .tied = true}),
            3'075'098'624);
  EXPECT_EQ(
      of(Family::kOlmo2, {.vocab = 100352, .dim = 4096, .layers = 32, .heads = 32, .ffn = 11008}),
      7'298'617'344);
  EXPECT_EQ(
      of(Family::kPhi3, {.vocab = 32064, .dim = 3072, .layers = 32, .heads = 32, .ffn = 8192}),
      3'821'079'552);
  EXPECT_EQ(of(Family::kGemma3, {.vocab = 262144,
                                 .dim = 1152,
                                 .layers = 26,
                                 .heads = 4,
                                 .kv_heads = 1,
                                 .head_dim = 256,
                                 .ffn = 6912,
                                 .tied = true}),
            999'885'952);
}

TEST(Construction, ExpertsOfPublishedModels) {
  const auto counts = [](Family family, DecoderConfig sizes, const Mixture& mixture) {
    const DecoderConfig config = of_family(family, with(std::move(sizes), mixture));
    return std::pair(parameter_count(config), active_parameter_count(config));
  };
  using Counts = std::pair<int64_t, int64_t>;
  EXPECT_EQ(
      counts(Family::kMixtral,
             {.vocab = 32000, .dim = 4096, .layers = 32, .heads = 32, .kv_heads = 8, .ffn = 14336},
             {.experts = 8, .top_k = 2}),
      Counts(46'702'792'704, 12'879'925'248));
  EXPECT_EQ(counts(Family::kQwen3Moe,
                   {.vocab = 151936,
                    .dim = 2048,
                    .layers = 48,
                    .heads = 32,
                    .kv_heads = 4,
                    .head_dim = 128,
                    .ffn = 6144},
                   {.experts = 128, .top_k = 8, .ffn = 768}),
            Counts(30'532'122'624, 3'353'032'704));
  EXPECT_EQ(
      counts(Family::kOlmoe, {.vocab = 50304, .dim = 2048, .layers = 16, .heads = 16, .ffn = 1024},
             {.experts = 64, .top_k = 8}),
      Counts(6'919'161'856, 1'282'017'280));
}

TEST(Construction, AnMlpStartsAsItsLinearsDo) {
  const MLPConfig config{.width = 24, .layers = 3};
  torch::manual_seed(8);
  MLP plain(config);
  torch::manual_seed(8);
  MLP described(config);
  torch::manual_seed(8);
  for (const auto& item : described->named_parameters())
    init_tensor_(item.value(), described->initial(item.key(), item.value().sizes()));
  for (const auto& item : plain->named_parameters())
    EXPECT_TRUE(at::allclose(item.value(), described->named_parameters()[item.key()], 1e-5, 1e-7))
        << item.key();
}

// --- dropout ---

TEST(Gpt2Dropout, EachKindIsOnInTrainingAndOffInEvaluation) {
  for (int kind : {0, 1, 2}) {
    GPT2Config config = kGpt2;
    (kind == 0   ? config.embd_dropout
     : kind == 1 ? config.attn_dropout
                 : config.resid_dropout) = 0.5;
    torch::manual_seed(7);
    GPT2 model(config);
    torch::manual_seed(7);
    GPT2 plain(kGpt2);
    torch::NoGradGuard no_grad;
    for (auto& each : {model, plain})
      for (auto& parameter : each->parameters())
        if (parameter.dim() > 1) parameter.mul_(10);
    TextInputs inputs{.ids = at::randint(0, 48, {2, 12}, at::kLong)};
    at::Tensor expected = plain->logits(inputs);
    EXPECT_FALSE(at::allclose(model->logits(inputs), expected)) << kind;
    EXPECT_FALSE(at::equal(model->logits(inputs), model->logits(inputs))) << kind;
    model->eval();
    EXPECT_TRUE(at::equal(model->logits(inputs), expected)) << kind;
  }
}

// --- refusals ---

TEST(Configurations, RefuseInvalidNumbers) {
  auto llama = [](auto change) {
    LlamaConfig config = kLlama;
    change(config);
    EXPECT_THROW(checked(config), Error);
  };
  llama([](LlamaConfig& c) { c.head_dim = 7; });
  llama([](LlamaConfig& c) { c.head_dim = -2; });
  llama([](LlamaConfig& c) { c.layers = -1; });
  llama([](LlamaConfig& c) { c.rope_base = 0; });
  llama([](LlamaConfig& c) { c.norm_eps = std::nan(""); });
  llama([](LlamaConfig& c) { c.rope_scaling = RopeScaling{.factor = 0}; });
  llama([](LlamaConfig& c) { c.rope_scaling = RopeScaling{.high_freq_factor = 1}; });
  llama(
      [](LlamaConfig& c) { c.rope_scaling = RopeScaling{.original_max_position_embeddings = 0}; });
  llama([](LlamaConfig& c) { c.window = -1; });
  llama([](LlamaConfig& c) { c.full_every = -1; });
  llama([](LlamaConfig& c) { c.query_pre_attn_scalar = -1; });
  llama([](LlamaConfig& c) { c.long_rope = LongRope{.short_factors = {1}, .long_factors = {2}}; });
  llama([](LlamaConfig& c) {
    c.long_rope = LongRope{.short_factors = {1, 0}, .long_factors = {2, 2}};
  });
  llama([](LlamaConfig& c) {
    c.rope_scaling = RopeScaling{};
    c.long_rope = LongRope{.short_factors = {1, 1}, .long_factors = {2, 2}};
  });
  llama([](LlamaConfig& c) { c.yarn = Yarn{.factor = 0.5}; });
  llama([](LlamaConfig& c) { c.yarn = Yarn{.beta_fast = 1, .beta_slow = 2}; });
  llama([](LlamaConfig& c) { c.yarn = Yarn{}, c.linear_rope = 2; });
  llama([](LlamaConfig& c) { c.linear_rope = -1; });
  llama([](LlamaConfig& c) { c.rotary_dim = 3; });
  llama([](LlamaConfig& c) { c.rotary_dim = 1000; });
  auto gpt2 = [](auto change) {
    GPT2Config config = kGpt2;
    change(config);
    EXPECT_THROW(checked(config), Error);
  };
  gpt2([](GPT2Config& c) { c.heads = 3; });
  gpt2([](GPT2Config& c) { c.vocab = 0; });
  gpt2([](GPT2Config& c) { c.max_tokens = 0; });
  gpt2([](GPT2Config& c) { c.attn_dropout = 1; });
  gpt2([](GPT2Config& c) { c.resid_dropout = -0.1; });
  gpt2([](GPT2Config& c) { c.init_std = -1; });
  EXPECT_THROW(checked(MLPConfig{.width = 0}), Error);
  EXPECT_THROW(checked(MLPConfig{.layers = 0}), Error);
}

TEST(Configurations, ZerosAreFilledIn) {
  EXPECT_EQ(checked(kLlama).head_dim, 4);
  EXPECT_EQ(checked(kGpt2).ffn, 64);
  LlamaConfig qwen = qwen2(kLlama);
  EXPECT_TRUE(qwen.qkv_bias);
  EXPECT_EQ(qwen.rope_base, 1e6);
  EXPECT_EQ(qwen.norm_eps, 1e-6);
}

}  // namespace
}  // namespace fsdp::models
