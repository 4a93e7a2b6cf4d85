// Recomputation of sharded models: training is bit for bit the same as without recomputation, on
// any number of ranks, and less is kept.
#include <ATen/ATen.h>
#include <torch/utils.h>

#include <optional>

#include "base/seams.h"
#include "fsdp/models/gpt2.h"
#include "fsdp/models/llama.h"
#include "fsdp/optim.h"
#include "fsdp/recompute.h"
#include "shard/oracle.h"
#include "shard/saved_activations.h"

namespace fsdp::testing::sharded_recompute {
namespace {

struct Trained {
  std::vector<at::Tensor> losses, gradients, parameters;
  int64_t kept = 0;  // between forward and backward, in the last step
  int64_t left = 0;  // after it
};

struct Training {
  std::function<Built()> build;
  std::function<Batch(int step, int rank)> batch;
  ShardOptions options;
  std::optional<RecomputePolicy> policy = {};
  bool policy_first = false;  // before fully_shard
  int micro_batches = 1;
  int steps = 3;
};

Trained train(const Training& training) {
  if (!test_device().is_cpu())  // a GPU may sum in a different order each time
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  torch::manual_seed(kSeed);
  Built built = training.build();
  auto apply = [&](const auto& model) {
    if (training.policy) apply_activation_checkpointing(model, *training.policy);
  };
  if (training.policy_first) apply(built.module);
  Sharded sharded = fully_shard(built.module, training.options);
  if (!training.policy_first) apply(sharded);
  AdamW optimizer(sharded, {.lr = 1e-2});
  Trained result;
  torch::manual_seed(kSeed + rank());
  for (int step = 0; step < training.steps; ++step) {
    sharded.count_activations(true);
    at::Tensor loss;
    for (int i = 0; i < training.micro_batches; ++i) {
      Batch batch = moved(training.batch(step * training.micro_batches + i, rank()), test_device());
      at::Tensor one = built.loss(batch);
      loss = loss.defined() ? loss + one : one;
    }
    result.kept = sharded.memory().activations;
    loss.backward();
    result.losses.push_back(loss.detach().clone());
    loss.reset();
    result.left = shard::saved_activations::held();
    for (const auto& [name, parameter] : built.parameters) {
      at::Tensor gradient = sharded.full_grad(name);
      result.gradients.push_back(gradient.defined() ? gradient.clone() : gradient);
    }
    optimizer.step();
    sharded.zero_grad();
  }
  sharded.count_activations(false);
  for (const auto& [name, parameter] : built.parameters)
    result.parameters.push_back(sharded.full_tensor(name).clone());
  return result;
}

void expect_equal(const Trained& plain, const Trained& other) {
  auto same = [](const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b,
                 const char* what) {
    EXPECT_EQ(a.size(), b.size()) << what;
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
      EXPECT_EQ(a[i].defined(), b[i].defined()) << what << " " << i;
      if (!a[i].defined() || !b[i].defined()) continue;
      EXPECT_TRUE(at::equal(a[i], b[i])) << what << " " << i;
    }
  };
  same(plain.losses, other.losses, "loss");
  same(plain.gradients, other.gradients, "gradient");
  same(plain.parameters, other.parameters, "parameter");
  EXPECT_EQ(other.left, 0);
}

// Compares all modes with a plain run. Returns what each keeps: plain, full, selective, offload,
// full with inputs offloaded.
std::vector<int64_t> expect_same(Training training, const WrapPolicy& which) {
  Trained plain = train(training);
  std::vector<int64_t> kept{plain.kept};
  const WithSeams everything({.smallest_offloaded = 1});  // nothing here is large
  for (Recompute mode :
       {Recompute::FULL, Recompute::SELECTIVE, Recompute::OFFLOAD, Recompute::FULL_OFFLOAD}) {
    SCOPED_TRACE(mode == Recompute::FULL        ? "full"
                 : mode == Recompute::SELECTIVE ? "selective"
                 : mode == Recompute::OFFLOAD   ? "offload"
                                                : "full, offload");
    training.policy = RecomputePolicy(which, {.mode = mode});
    Trained again = train(training);
    expect_equal(plain, again);
    kept.push_back(again.kept);
  }
  return kept;
}

Training transformer(ShardOptions options) {
  options.wrap = wrap::modules<Block>();
  options.device = test_device();
  return {.build =
              [] {
                Transformer model(32, 4, 4);
                return built(model.ptr(), [model](const Batch& batch) mutable {
                  return model->loss(batch.x, batch.y);
                });
              },
          .batch =
              [](int step, int rank) {
                std::vector<int64_t> sizes = {16, TransformerImpl::kTokens};
                int64_t below = TransformerImpl::kVocabulary;
                return Batch{step, random_integers(step, rank, 0, below, sizes),
                             random_integers(step, rank, 1, below, sizes)};
              },
          .options = options};
}

Training llama(ShardOptions options, int64_t tile = 0) {
  options.wrap = wrap::modules<models::LlamaBlock>();
  options.device = test_device();
  return {.build =
              [tile] {
                models::Llama model(models::LlamaConfig{
                    .vocab = 61, .dim = 32, .layers = 4, .heads = 4, .kv_heads = 2, .ffn = 64});
                model->tile_feed_forward(tile);
                return built(model.ptr(), [model](const Batch& batch) mutable {
                  return model->forward(batch.x, batch.y);
                });
              },
          .batch =
              [](int step, int rank) {
                return Batch{step, random_integers(step, rank, 0, 61, {4, 24}),
                             random_integers(step, rank, 1, 61, {4, 24})};
              },
          .options = options};
}

TEST(ShardedRecompute, ATransformerIsTheSame) {
  for (bool shared : {true, false}) {
    SCOPED_TRACE(shared ? "shared" : "gathered");
    auto kept = expect_same(transformer({.share_host_memory = shared}), wrap::modules<Block>());
    EXPECT_LT(2 * kept[1], kept[0]);
    EXPECT_LT(kept[1], kept[2]);
    EXPECT_LT(kept[2], kept[0]);
  }
}

TEST(ShardedRecompute, OtherStrategiesAreTheSame) {
  for (auto strategy : {ShardingStrategy::SHARD_GRAD_OP, ShardingStrategy::NO_SHARD})
    expect_same(transformer({.strategy = strategy}), wrap::modules<Block>());
}

TEST(ShardedRecompute, RegionsNeedNotBeUnits) {
  Training whole = transformer({});
  whole.options.wrap = {};  // the root is the only unit
  expect_same(whole, wrap::modules<Block>());
  Training fine = transformer({.share_host_memory = false});
  fine.options.wrap = wrap::modules<nn::Linear>();
  expect_same(fine, wrap::modules<Block>());
  expect_same(transformer({.share_host_memory = false}), wrap::names({"blocks.1", "blocks.2"}));
}

TEST(ShardedRecompute, TheSameElementsAreDropped) {
  Training training;
  training.build = [] {
    nn::Sequential model(nn::Linear(32, 64), nn::Dropout(0.5), nn::Tanh(), nn::Linear(64, 32),
                         nn::Dropout(0.3), nn::Linear(32, 8));
    return built(model.ptr(), [model](const Batch& batch) mutable {
      return model->forward(batch.x).square().mean();
    });
  };
  training.batch = [](int step, int rank) {
    at::Tensor x = random_normal(step, rank, 0, {16, 32});
    return Batch{step, x, x};
  };
  training.options = {.wrap = wrap::modules<nn::Linear>(), .device = test_device()};
  expect_same(training, wrap::modules<nn::Linear>());
}

TEST(ShardedRecompute, ThePolicyMayBeAppliedBeforeSharding) {
  Training training = transformer({.share_host_memory = false});
  int64_t kept = expect_same(training, wrap::modules<Block>())[1];
  training.policy_first = true;
  EXPECT_EQ(expect_same(training, wrap::modules<Block>())[1], kept);
}

TEST(ShardedRecompute, SeveralForwardsBeforeABackwardAreTheSame) {
  Training training = transformer({.share_host_memory = false});
  training.micro_batches = 3;
  expect_same(training, wrap::modules<Block>());
}

TEST(ShardedRecompute, MixedPrecisionIsTheSame) {
  Training training = transformer({.mixed_precision = bf16_precision()});
  auto kept = expect_same(training, wrap::modules<Block>());
  EXPECT_LT(2 * kept[1], kept[0]);
}

TEST(ShardedRecompute, OtherModelsAreTheSame) {
  for (const ModelCase& known : model_cases()) {
    SCOPED_TRACE(known.name);
    Training training{.build = known.build, .batch = known.batch, .options = {}};
    training.options.wrap = known.wrap;
    training.options.device = test_device();
    if (!known.build().module) continue;  // TorchScript
    expect_same(training, known.wrap);
  }
}

TEST(ShardedRecompute, ALlamaIsTheSame) {
  auto which = wrap::modules<models::LlamaBlock>();
  auto kept = expect_same(llama({}), which);
  EXPECT_LT(4 * kept[1], kept[0]);
  EXPECT_LE(kept[2], kept[0] + 64);  // selective: the same products
  expect_same(llama({.share_host_memory = false}), which);
  auto half = expect_same(llama({.mixed_precision = bf16_precision()}), which);
  EXPECT_LT(2 * half[1], half[0]);
  EXPECT_LT(kept[3], kept[0] * 3 / 4);  // two of four blocks
}

// A block keeps 4 · dim besides gate and up, which are also 4 · dim here; recomputation keeps their
// input instead. A GPU's attention pads what it keeps of such small heads.
TEST(ShardedRecompute, AFeedForwardAloneIsTheSameAndKeepsLess) {
  auto kept = expect_same(llama({}), wrap::modules<models::SwiGLU>());
  EXPECT_LT(kept[1], kept[0] * 4 / 5);
  Training gpt2 = llama({});
  gpt2.options.wrap = wrap::modules<models::GPT2Block>();
  gpt2.build = [] {
    models::GPT2 model(
        models::GPT2Config{.vocab = 61, .max_tokens = 24, .dim = 32, .layers = 4, .heads = 4});
    return built(model.ptr(),
                 [model](const Batch& batch) mutable { return model->forward(batch.x, batch.y); });
  };
  kept = expect_same(gpt2, wrap::modules<models::GPT2MLP>());
  EXPECT_LT(kept[1], kept[0] * 4 / 5);
}

void expect_close(const Trained& tiled, const Trained& whole, double tolerance) {
  auto close = [&](const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b,
                   const char* what) {
    ASSERT_EQ(a.size(), b.size()) << what;
    for (size_t i = 0; i < a.size(); ++i)
      EXPECT_LE((a[i].to(at::kDouble) - b[i].to(at::kDouble)).norm().item<double>(),
                tolerance * b[i].to(at::kDouble).norm().item<double>())
          << what << " " << i;
  };
  close(tiled.losses, whole.losses, "loss");
  close(tiled.gradients, whole.gradients, "gradient");
}

// 96 tokens in tiles of 20. Rounding differs with the tile, not with what is kept.
TEST(ShardedRecompute, TiledFeedForwardsOfALlamaAreTheSame) {
  auto blocks = wrap::modules<models::LlamaBlock>();
  Training whole = llama({.share_host_memory = false}), tiled = llama(whole.options, 20);
  whole.steps = tiled.steps = 1;
  expect_close(train(tiled), train(whole), 1e-5);
  auto kept = expect_same(llama({}, 20), blocks);
  EXPECT_LT(3 * kept[1], kept[0]);
  EXPECT_LT(kept[4], kept[1]);  // one block's input of four
  Training half = llama({.mixed_precision = bf16_precision()});
  tiled = llama(half.options, 20);
  half.steps = tiled.steps = 1;
  expect_close(train(tiled), train(half), 2e-2);
  expect_same(llama(half.options, 20), blocks);
}

TEST(ShardedRecompute, TiledFeedForwardsOfAGPT2AreTheSame) {
  auto gpt2 = [](int64_t tile) {
    Training training = llama({});
    training.options.wrap = wrap::modules<models::GPT2Block>();
    training.steps = 1;
    training.build = [tile] {
      models::GPT2 model(
          models::GPT2Config{.vocab = 61, .max_tokens = 24, .dim = 32, .layers = 2, .heads = 4});
      model->tile_feed_forward(tile);
      return built(model.ptr(), [model](const Batch& batch) mutable {
        return model->forward(batch.x, batch.y);
      });
    };
    return training;
  };
  expect_close(train(gpt2(20)), train(gpt2(0)), 1e-5);
}

TEST(ShardedRecompute, AStepBetweenForwardAndBackwardIsAnError) {
  Training training = transformer({});
  torch::manual_seed(kSeed);
  Built built = training.build();
  Sharded sharded = fully_shard(built.module, training.options);
  apply_activation_checkpointing(sharded, wrap::modules<Block>());
  AdamW optimizer(sharded, {.lr = 1e-2});
  Batch batch = moved(training.batch(0, rank()), test_device());
  built.loss(batch).backward();
  at::Tensor loss = built.loss(batch);
  optimizer.step();
  expect_error([&] { loss.backward(); }, {"changed in place", "optimizer.step()"});
}

}  // namespace
}  // namespace fsdp::testing::sharded_recompute
