// The model section of a config: every family comes back from a run's TOML as it went in.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "fsdp/error.h"
#include "train/config_resolve.h"
#include "train/config_write.h"
#include "train/matrices.h"
#include "train/model_shape.h"
#include "train/plan_config.h"
#include "train/task.h"

namespace fsdp::train {
namespace {

using models::DecoderConfig;
using models::Family;

const DecoderConfig kSizes{
    .vocab = 64, .dim = 32, .layers = 6, .heads = 4, .kv_heads = 2, .head_dim = 8, .ffn = 40};

std::vector<DecoderConfig> decoders() {
  std::vector<DecoderConfig> all;
  for (int family = 0; family <= static_cast<int>(Family::kDots1); ++family)
    all.push_back(models::of_family(static_cast<Family>(family), kSizes));
  all[static_cast<size_t>(Family::kMistral)].window = 9;
  all[static_cast<size_t>(Family::kSmolLM3)].no_rope_every = 3;
  all[static_cast<size_t>(Family::kPhi3)].long_rope =
      models::LongRope{.short_factors = {1, 1.125, 1.3, 2}, .long_factors = {1.5, 2, 3.25, 64.1}};
  all[static_cast<size_t>(Family::kQwen3)].yarn =
      models::Yarn{.factor = 3,
                   .beta_fast = 20,
                   .beta_slow = 2,
                   .attention_factor = 1.5,
                   .truncate = false,
                   .original_max_position_embeddings = 77};
  all[static_cast<size_t>(Family::kLlama)].linear_rope = 2.5;
  all[static_cast<size_t>(Family::kMixtral)].window = 7;
  all[static_cast<size_t>(Family::kMixtral)].mixture->experts = 5;
  all[static_cast<size_t>(Family::kQwen3Moe)].mixture =
      models::Mixture{.experts = 9, .top_k = 4, .ffn = 12, .normalize = false};
  all[static_cast<size_t>(Family::kOlmoe)].mixture->normalize = false;
  all[static_cast<size_t>(Family::kDots1)].mixture =
      models::Mixture{.experts = 6,
                      .top_k = 3,
                      .ffn = 12,
                      .shared = 2,
                      .dense_layers = 1,
                      .score = nn::RouterScore::kSigmoid,
                      .scale = 2.5,
                      .biased = true};
  all.push_back(models::of_family(Family::kPhi3, kSizes));
  all.back().rotary_dim = 6;
  DecoderConfig& gemma = all[static_cast<size_t>(Family::kGemma3)];
  gemma.window = 5;
  gemma.full_every = 3;
  gemma.local_rope_base = 123;
  gemma.query_pre_attn_scalar = 17;
  gemma.linear_rope = 8;
  return all;
}

TEST(ModelShape, EveryFamilyComesBackFromARunsConfig) {
  for (const DecoderConfig& decoder : decoders()) {
    Config config, read;
    set_model_shape(config.model, decoder);
    apply_toml(read, to_toml(config), "config.toml");
    const models::AnyConfig shape = model_shape(read);
    EXPECT_EQ(models::hugging_face_config(shape, "float32"),
              models::hugging_face_config(decoder, "float32"));
    const auto& back = std::get<DecoderConfig>(shape);
    EXPECT_EQ(back.family, decoder.family);
    EXPECT_EQ(parameter_count(back), parameter_count(decoder));
  }
}

TEST(ModelShape, AFactorThatIsNoNumberIsRefused) {
  Config config;
  set_model_shape(config.model, decoders()[static_cast<size_t>(Family::kPhi3)]);
  config.model.rope_long_factors[1] = "2x";
  EXPECT_THROW(model_shape(config), Error);
}

// --- muon ---

TEST(MatrixParameters, FusedProjectionsAreCut) {
  Config config;
  set_model_shape(config.model, decoders()[static_cast<size_t>(Family::kPhi3)]);
  const auto sizes = [&](const std::string& name) {
    return matrix_parameters(config).split(name, {}).sizes;
  };
  using Sizes = std::vector<int64_t>;
  EXPECT_EQ(sizes("model.layers.0.self_attn.qkv_proj.weight"), (Sizes{32, 16, 16}));
  EXPECT_EQ(sizes("model.layers.0.mlp.gate_up_proj.weight"), (Sizes{40, 40}));
  EXPECT_EQ(sizes("model.layers.0.mlp.down_proj.weight"), Sizes());
  set_model_shape(config.model, decoders()[static_cast<size_t>(Family::kQwen3Moe)]);
  EXPECT_EQ(sizes("model.layers.0.mlp.experts.gate_up_proj"), (Sizes{12, 12}));  // of each expert
  EXPECT_EQ(sizes("model.layers.0.mlp.experts.down_proj"), Sizes());
  set_model_shape(config.model, decoders()[static_cast<size_t>(Family::kPhi3)]);
  config.optim.muon_per_head = true;
  EXPECT_EQ(sizes("model.layers.0.self_attn.qkv_proj.weight"), Sizes(8, 8));
  EXPECT_EQ(sizes("model.layers.0.self_attn.q_proj.weight"), Sizes(4, 8));
  EXPECT_EQ(sizes("model.layers.0.self_attn.o_proj.weight"), Sizes());
  set_model_shape(config.model, models::GPT2Config{.vocab = 64, .dim = 32, .heads = 4});
  const MatrixSplit split = matrix_parameters(config).split("h.0.attn.c_attn.weight", {});
  EXPECT_EQ(split.dim, 1);
  EXPECT_EQ(split.sizes, Sizes(12, 8));
}

TEST(MatrixParameters, APlanCountsOneStateOfMatrices) {
  Config config;
  set_model_shape(config.model, kSizes);
  config.data.seq = 16;
  config.train.batch = 4;
  const auto states = [&](optim::OptimizerType type) {
    config.optim.type = type;
    const ConfigPlan planned = plan_of(config, 2, {}, 2);
    return plan(planned.model, planned.options).memory.states;
  };
  const auto adamw = states(optim::OptimizerType::kAdamW);
  const auto muon = states(optim::OptimizerType::kMuon);
  EXPECT_LT(muon, adamw * 3 / 4);
  EXPECT_GT(muon, adamw / 2);
}

// The states are of all experts, the work of a token of those that it goes to.
TEST(ModelShape, APlanKnowsAllExpertsAndThoseOfAToken) {
  Config config;
  set_model_shape(config.model, models::of_family(Family::kMixtral, kSizes));
  config.data.seq = 16;
  config.train.batch = 4;
  struct Planned {
    int64_t states;
    double flops;
  };
  const auto planned = [&](int64_t experts, int64_t per_token) {
    config.model.experts = experts;
    config.model.experts_per_token = per_token;
    const ConfigPlan made = plan_of(config, 2, {}, 2);
    EXPECT_NE(made.title.find(" of them per token"), std::string::npos) << made.title;
    const double flops = make_unfilled_task(config, 64).flops_per_sample;
    return Planned{plan(made.model, made.options).memory.states, flops};
  };
  const Planned few = planned(4, 2), many = planned(16, 2), busy = planned(16, 4);
  EXPECT_GT(many.states, 3 * few.states);
  EXPECT_LT(many.flops, 1.1 * few.flops);  // a wider router
  EXPECT_GT(busy.flops, 1.3 * many.flops);
  EXPECT_EQ(busy.states, many.states);
}

}  // namespace
}  // namespace fsdp::train
