// Models whose sequences several ranks share, trained beside one process with whole sequences.
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include "fsdp/context_parallel.h"
#include "fsdp/fully_shard.h"
#include "fsdp/mesh.h"
#include "fsdp/models.h"
#include "fsdp/nn.h"
#include "fsdp/optim.h"
#include "fsdp/recompute.h"
#include "shard/world.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kBatch = 2, kTokens = 24, kVocab = 43;
constexpr double kClip = 0.5;

using Model = std::shared_ptr<models::CausalLMImpl>;

struct ContextCase {
  std::string name;
  std::function<Model()> build;
  bool documents = false, padding = false;
  std::optional<Recompute> recompute = {};
  ContextKind kind = ContextKind::ULYSSES;
};

Model context_llama(int64_t kv_heads, int64_t window = 0) {
  models::DecoderConfig config{
      .vocab = kVocab, .dim = 24, .layers = 2, .heads = 12, .kv_heads = kv_heads, .ffn = 40};
  config.window = window;
  return models::Llama(config).ptr();
}

Model context_gpt2() {
  // Not tied: torch's optimizers would count a parameter with two names twice.
  return models::GPT2(models::GPT2Config{.vocab = kVocab,
                                         .max_tokens = kTokens,
                                         .dim = 24,
                                         .layers = 2,
                                         .heads = 12,
                                         .tied = false})
      .ptr();
}

std::vector<ContextCase> context_cases() {
  const auto wide = [] { return context_llama(12); };
  return {
      {"llama", wide},
      {"window", [] { return context_llama(12, 5); }},
      {"one_key_head", [] { return context_llama(1); }},
      {"gpt2", context_gpt2},
      {"documents", wide, true},
      {"padding", wide, false, true},
      {"recomputed", wide, true, false, Recompute::FULL},
      {"selective", wide, false, false, Recompute::SELECTIVE},
      {"ring", wide, false, false, {}, ContextKind::RING},
      {"ring_of_few_keys", [] { return context_llama(4); }, false, false, {}, ContextKind::RING},
      {"ring_gpt2", context_gpt2, false, false, {}, ContextKind::RING},
      {"ring_documents", wide, true, false, {}, ContextKind::RING},
      {"ring_recomputed", wide, true, false, Recompute::FULL, ContextKind::RING}};
}

// A step's data: the same for all ranks of a context.
models::TextInputs whole_inputs(const ContextCase& of, int seed) {
  torch::manual_seed(seed);
  models::TextInputs inputs{.ids = at::randint(0, kVocab, {kBatch, kTokens}, at::kLong)};
  if (of.documents) {
    const at::Tensor ends = at::rand({kBatch, kTokens}).lt(0.2).to(at::kLong);
    inputs.documents = models::cumulative_lengths(ends.cumsum(1));
    inputs.restart_positions = true;
  }
  if (of.padding) inputs.padding = at::arange(kTokens).lt(kTokens - 7).repeat({kBatch, 1});
  return inputs;
}

// Both models are trained on the batches of all data groups; `context` ranks share each sequence.
void train_beside_one_process(const ContextCase& of, int context) {
  const int groups = world_size() / context;
  const DeviceMesh mesh(test_world(), {{"shard", groups}, {"context", context}});
  torch::manual_seed(3);
  const Model mine = of.build();
  torch::manual_seed(3);
  const Model plain = of.build();
  plain->to(test_device());
  const WrapPolicy blocks = wrap::modules<models::DecoderBlock, models::GPT2Block>();
  auto sharded = fully_shard(mine, {.wrap = blocks, .mesh = mesh, .device = test_device()});
  if (of.recompute)
    apply_activation_checkpointing(sharded, RecomputePolicy(blocks, {.mode = *of.recompute}));
  SGD mine_sgd(sharded, {.lr = 0.1, .momentum = 0.9});
  torch::optim::SGD plain_sgd(plain->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  const Context shared(mesh.comm("context"), of.kind);
  const auto targets = [](const models::TextInputs& inputs) { return inputs.ids.roll(-1, 1); };
  for (int step = 0; step < 3; ++step) {
    double expected = 0, own = 0;
    plain_sgd.zero_grad();
    for (int group = 0; group < groups; ++group) {
      models::TextInputs inputs = whole_inputs(of, 10 * step + group);
      inputs.ids = inputs.ids.to(test_device());
      const at::Tensor wanted = targets(inputs);
      const double scale = 1.0 / static_cast<double>(kBatch * kTokens);
      const at::Tensor loss = plain->loss_sum(inputs, wanted) * (scale / groups);
      loss.backward();
      expected += loss.item<double>();
      if (group != mesh.coordinate("shard")) continue;
      inputs.ids = shared.part(inputs.ids);
      inputs.context = shared;
      const at::Tensor part = mine->loss_sum(inputs, shared.part(wanted)) * (scale * context);
      part.backward();
      own = part.item<double>() / world_size();
    }
    EXPECT_NEAR(sum_over_ranks(own), expected, 1e-5) << "step " << step;
    for (const auto& item : plain->named_parameters()) {
      const at::Tensor gradient = sharded.full_grad(item.key());
      EXPECT_LE((gradient - item.value().grad()).abs().max().item<double>(), 1e-5) << item.key();
    }
    const double norm = torch::nn::utils::clip_grad_norm_(plain->parameters(), kClip);
    EXPECT_NEAR(sharded.clip_grad_norm_(kClip).item<double>(), norm, 1e-5 * (1 + norm));
    plain_sgd.step();
    mine_sgd.step();
    sharded.zero_grad();
  }
  for (const auto& item : plain->named_parameters())
    EXPECT_LE((sharded.full_tensor(item.key()) - item.value()).abs().max().item<double>(), 1e-5)
        << item.key();
}

class ContextOf : public ::testing::TestWithParam<ContextCase> {};

INSTANTIATE_TEST_SUITE_P(Cases, ContextOf, ::testing::ValuesIn(context_cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(ContextOf, AllRanksTrainsAsOneProcess) {
  train_beside_one_process(GetParam(), world_size());
}

TEST_P(ContextOf, HalfOfTheRanksTrainsAsOneProcess) {
  if (world_size() % 2 != 0) GTEST_SKIP() << "needs an even number of ranks";
  train_beside_one_process(GetParam(), world_size() / 2);
}

TEST(Context, WrapsAttentionOfOnesOwn) {
  const Context context(test_world().comm());
  torch::manual_seed(5);
  std::vector<at::Tensor> whole, parts;
  for (int64_t heads : {12, 12, 12}) {
    whole.push_back(at::randn({kBatch, heads, kTokens, 4}, at::kDouble));
    parts.push_back(context.part(whole.back(), 2).clone().to(test_device()));
    whole.back().set_requires_grad(true);
    parts.back().set_requires_grad(true);
  }
  int64_t seen = 0;
  const auto own = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    seen = q.size(1);
    return at::matmul(at::softmax(at::matmul(q, k.transpose(2, 3)), -1), v);
  };
  const at::Tensor expected = own(whole[0], whole[1], whole[2]);
  const at::Tensor out = context_parallel(own, context)(parts[0], parts[1], parts[2]);
  EXPECT_EQ(seen, 12 / world_size());
  EXPECT_LE((out.cpu() - context.part(expected, 2)).abs().max().item<double>(), 1e-12);
  const at::Tensor weights = at::randn(expected.sizes(), at::kDouble);
  (expected * weights).sum().backward();
  (out.cpu() * context.part(weights, 2)).sum().backward();
  for (size_t i = 0; i < whole.size(); ++i)
    EXPECT_LE((parts[i].grad().cpu() - context.part(whole[i].grad(), 2)).abs().max().item<double>(),
              1e-12)
        << i;
}

TEST(Context, ARingNeedsNoOrder) {
  const Context context(test_world().comm(), ContextKind::RING);
  torch::manual_seed(6);
  std::vector<at::Tensor> whole, parts;
  for (int64_t heads : {6, 2, 2}) {
    whole.push_back(at::randn({kBatch, heads, kTokens, 4}, at::kDouble));
    parts.push_back(context.part(whole.back(), 2).clone().to(test_device()));
    whole.back().set_requires_grad(true);
    parts.back().set_requires_grad(true);
  }
  for (const bool causal : {false, true}) {
    const at::Tensor expected =
        fsdp::nn::attention(whole[0], whole[1], whole[2], {.causal = causal, .scale = 0.3});
    const at::Tensor out = fsdp::nn::attention(
        parts[0], parts[1], parts[2], {.causal = causal, .scale = 0.3, .context = context});
    EXPECT_LE((out.cpu() - context.part(expected, 2)).abs().max().item<double>(), 1e-12) << causal;
    const at::Tensor weights = at::randn(expected.sizes(), at::kDouble);
    (expected * weights).sum().backward();
    (out.cpu() * context.part(weights, 2)).sum().backward();
    for (size_t i = 0; i < whole.size(); ++i)
      EXPECT_LE(
          (parts[i].grad().cpu() - context.part(whole[i].grad(), 2)).abs().max().item<double>(),
          1e-12)
          << i << causal;
  }
}

TEST(Context, RefusesWhatCanNotBeDivided) {
  const Context context(test_world().comm());
  if (world_size() == 1) GTEST_SKIP() << "one rank has whole sequences";
  const auto attend = [&](int64_t heads, int64_t kv_heads) {
    const at::Tensor q = at::zeros({1, heads, 2, 4}), k = at::zeros({1, kv_heads, 2, 4});
    fsdp::nn::attention(q, k, k, {.causal = true, .context = context});
  };
  expect_error([&] { attend(13, 13); }, {"13 heads", "context"});
  expect_error([&] { attend(60, 5); }, {"5 heads of keys"});
  expect_error([&] { context.part(at::zeros({1, 25})); }, {"25 tokens"});
  const Context ring(test_world().comm(), ContextKind::RING);
  expect_error([&] { ring.part(at::zeros({1, 25})); }, {"25 tokens", "chunks"});
  expect_error([&] { context_parallel({}, ring); }, {"ring", "itself"});
  const at::Tensor q = at::zeros({1, 2, 4, 4});
  expect_error(
      [&] { fsdp::nn::attention(q, q, q, {.causal = true, .window = 3, .context = ring}); },
      {"sliding window"});
  models::KVCache cache(1);
  expect_error(
      [&] {
        models::plan_attention(
            {.ids = at::zeros({1, 2}, at::kLong), .cache = &cache, .context = context}, 1);
      },
      {"cache", "context"});
}

}  // namespace
}  // namespace fsdp::testing
