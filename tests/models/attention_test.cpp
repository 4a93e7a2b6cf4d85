// Masks and the cache: a sequence with padding, next to other documents, or fed piece by piece has
// the same scores as alone and in one pass.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/error.h"
#include "fsdp/models.h"

namespace fsdp::models {
namespace {

using Model = std::shared_ptr<CausalLMImpl>;

constexpr int64_t kVocab = 43;

// Weights large enough for every part to matter.
Model randomized(Model model) {
  torch::NoGradGuard no_grad;
  for (auto& item : model->named_parameters())
    if (item.value().dim() > 1)
      item.value().normal_(0, 0.15);
    else
      item.value().uniform_(0.3, 1.3);
  return model;
}

Model llama() {
  torch::manual_seed(1);
  return randomized(
      Llama(qwen2({.vocab = kVocab,
                   .dim = 24,
                   .layers = 2,
                   .heads = 4,
                   .kv_heads = 2,
                   .ffn = 40,
                   .rope_scaling = RopeScaling{.original_max_position_embeddings = 32}}))
          .ptr());
}

Model gpt2() {
  torch::manual_seed(2);
  return randomized(
      GPT2(GPT2Config{.vocab = kVocab, .max_tokens = 150, .dim = 24, .layers = 2, .heads = 4})
          .ptr());
}

at::Tensor random_ids(int64_t batch, int64_t tokens) {
  return at::randint(0, kVocab, {batch, tokens}, at::kLong);
}

void expect_close(const at::Tensor& a, const at::Tensor& b, const std::string& what) {
  ASSERT_EQ(a.sizes(), b.sizes()) << what;
  EXPECT_LE((a - b).abs().max().item<double>(), 1e-5) << what;
}

void expect_error(const std::function<void()>& act, const std::string& part) {
  try {
    act();
    ADD_FAILURE() << "no error: " << part;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    EXPECT_FALSE(error.hint().empty()) << error.what();
  }
}

struct Case {
  const char* name;
  Model (*build)();
};

class Attention : public ::testing::TestWithParam<Case> {
 protected:
  Model model_ = GetParam().build();
  torch::NoGradGuard no_grad_;
};

INSTANTIATE_TEST_SUITE_P(Models, Attention,
                         ::testing::Values(Case{"llama", llama}, Case{"gpt2", gpt2}),
                         [](const auto& info) { return std::string(info.param.name); });

// --- the cache ---

TEST_P(Attention, PiecesWithACacheScoreAsTheWhole) {
  at::Tensor ids = random_ids(2, 140);  // the cache grows several times
  at::Tensor whole = model_->logits({.ids = ids});
  KVCache cache(model_->layers());
  for (int round : {0, 1}) {  // the second reuses the memory of the first
    int64_t at = 0;
    for (int64_t piece : {1, 5, 1, 60, 1, 72}) {
      at::Tensor part = ids.slice(1, at, at + piece);
      expect_close(model_->logits({.ids = part, .cache = &cache}), whole.slice(1, at, at + piece),
                   "from " + std::to_string(at) + ", round " + std::to_string(round));
      at += piece;
      EXPECT_EQ(cache.tokens(), at);
    }
    cache.reset();
    EXPECT_EQ(cache.tokens(), 0);
  }
}

TEST_P(Attention, AfterResetACacheTakesABatchOfAnotherSizeAndType) {
  KVCache cache(model_->layers());
  model_->logits({.ids = random_ids(3, 9), .cache = &cache});
  cache.reset();
  at::Tensor ids = random_ids(1, 9);
  expect_close(model_->logits({.ids = ids, .cache = &cache}), model_->logits({.ids = ids}), "fp32");
  cache.reset();
  model_->to(at::kDouble);
  expect_close(model_->logits({.ids = ids, .cache = &cache}), model_->logits({.ids = ids}), "fp64");
}

TEST_P(Attention, ACacheFilledInInferenceModeWorksOutsideOfIt) {
  at::Tensor ids = random_ids(1, 8);
  KVCache cache(model_->layers());
  {
    c10::InferenceMode inference;
    model_->logits({.ids = ids.slice(1, 0, 5), .cache = &cache});
  }
  expect_close(model_->logits({.ids = ids.slice(1, 5), .cache = &cache}),
               model_->logits({.ids = ids}).slice(1, 5), "after");
  model_->train();
  at::AutoGradMode grad(true);
  model_->forward(ids, ids).backward();  // works with the tables made for the cache
}

TEST_P(Attention, AFailedPassLeavesTheCacheUnchanged) {
  at::Tensor ids = random_ids(2, 9), padding = at::ones({2, 9}, at::kBool);
  padding[0].slice(0, 0, 2).fill_(false);
  at::Tensor whole = model_->logits({.ids = ids, .padding = padding});
  KVCache cache(model_->layers());
  model_->logits({.ids = ids.slice(1, 0, 6), .padding = padding.slice(1, 0, 6), .cache = &cache});
  at::Tensor foreign = at::full({2, 3}, kVocab + 5, at::kLong);  // ids out of range
  EXPECT_ANY_THROW(model_->logits({.ids = foreign, .cache = &cache}));
  EXPECT_EQ(cache.tokens(), 6);
  expect_close(model_->logits({.ids = ids.slice(1, 6), .cache = &cache}), whole.slice(1, 6),
               "then");
}

TEST_P(Attention, AnUnsuitableCacheIsRefused) {
  at::Tensor ids = random_ids(2, 4);
  KVCache cache(model_->layers()), wrong(model_->layers() + 1);
  expect_error([&] { model_->logits({.ids = ids, .cache = &wrong}); }, "a cache of 3 layers");
  at::Tensor documents = cumulative_lengths(ids);
  expect_error([&] { model_->logits({.ids = ids, .documents = documents, .cache = &cache}); },
               "documents cannot");
  {
    at::AutoGradMode grad(true);
    expect_error([&] { model_->logits({.ids = ids, .cache = &cache}); }, "gradients are recorded");
  }
  model_->logits({.ids = ids, .cache = &cache});
  expect_error([&] { model_->logits({.ids = random_ids(3, 1), .cache = &cache}); },
               "a cache of 2 sequences was passed a batch of 3");
}

// --- padding ---

TEST_P(Attention, PaddedSequencesScoreAsAlone) {
  at::Tensor ids = random_ids(4, 10), padding = at::zeros({4, 10}, at::kBool);
  std::vector<std::pair<int64_t, int64_t>> real = {{0, 10}, {4, 10}, {0, 3}, {2, 7}};
  for (size_t i = 0; i < real.size(); ++i)
    padding[i].slice(0, real[i].first, real[i].second).fill_(true);
  for (const at::Tensor& mask : {padding, padding.to(at::kLong)}) {
    at::Tensor logits = model_->logits({.ids = ids, .padding = mask});
    EXPECT_TRUE(logits.isfinite().all().item<bool>());
    for (int64_t i = 0; i < 4; ++i) {
      auto [begin, end] = real[i];
      at::Tensor alone = model_->logits({.ids = ids[i].slice(0, begin, end).unsqueeze(0)});
      expect_close(logits[i].slice(0, begin, end), alone[0], "sequence " + std::to_string(i));
    }
  }
}

TEST_P(Attention, PaddedSequencesContinueInACache) {
  at::Tensor ids = random_ids(3, 6), next = random_ids(3, 4), padding = at::ones({3, 6}, at::kBool);
  padding[1].slice(0, 0, 4).fill_(false);  // left
  padding[2].slice(0, 4).fill_(false);     // right: the next token follows the last real one
  KVCache cache(model_->layers());
  model_->logits({.ids = ids, .padding = padding, .cache = &cache});
  std::vector<at::Tensor> pieces;
  for (auto [begin, end] : {std::pair(0, 1), std::pair(1, 3), std::pair(3, 4)})
    pieces.push_back(model_->logits({.ids = next.slice(1, begin, end), .cache = &cache}));
  at::Tensor logits = at::cat(pieces, 1);
  for (int64_t i = 0; i < 3; ++i) {
    at::Tensor whole = at::cat({ids[i].index({padding[i]}), next[i]}).unsqueeze(0);
    at::Tensor alone = model_->logits({.ids = whole});
    expect_close(logits[i], alone[0].slice(0, whole.size(1) - 4), "sequence " + std::to_string(i));
  }
}

TEST_P(Attention, PaddedTokensGetNoGradientFromTheLoss) {
  at::AutoGradMode grad(true);
  at::Tensor ids = at::arange(10, at::kLong).view({2, 5});
  at::Tensor padding = at::ones({2, 5}, at::kBool), targets = random_ids(2, 5);
  padding[0].slice(0, 0, 2).fill_(false);  // tokens 0 and 1
  padding[1][4].fill_(false);              // token 9
  targets.masked_fill_(padding.logical_not(), -100);
  model_->loss_sum({.ids = ids, .padding = padding}, targets).backward();
  for (const auto& item : model_->named_parameters())
    EXPECT_TRUE(item.value().grad().isfinite().all().item<bool>()) << item.key();
  auto* qwen = dynamic_cast<LlamaImpl*>(model_.get());
  if (!qwen) return;  // a tied embedding gets gradients for every token
  at::Tensor gradient = qwen->model->embed_tokens->weight.grad();
  for (int64_t token = 0; token < 10; ++token) {
    bool padded = token < 2 || token == 9;
    EXPECT_EQ(gradient[token].abs().max().item<double>() == 0, padded) << token;
  }
}

// A softmax row without any key is NaN in some implementations.
TEST(AttentionPlan, EveryTokenSeesItselfAndNoOtherTokenSeesPadding) {
  at::Tensor ids = random_ids(2, 4), padding = at::ones({2, 4}, at::kBool);
  padding[0].slice(0, 0, 2).fill_(false);
  at::Tensor mask = plan_attention({.ids = ids, .padding = padding}, 1).mask;
  ASSERT_EQ(mask.sizes(), (std::vector<int64_t>{2, 1, 4, 4}));
  for (int64_t query = 0; query < 4; ++query)
    for (int64_t key = 0; key < 4; ++key) {
      EXPECT_EQ(mask[1][0][query][key].item<bool>(), key <= query);
      EXPECT_EQ(mask[0][0][query][key].item<bool>(), key == query || (key <= query && key >= 2));
    }
}

TEST(AttentionPlan, WithoutMasksThereIsNone) {
  Attending plan = plan_attention({.ids = random_ids(2, 4)}, 1);
  EXPECT_FALSE(plan.mask.defined() || plan.positions.defined() || plan.cache);
  EXPECT_EQ(plan.past, 0);
}

// --- documents ---

TEST_P(Attention, DocumentsDoNotSeeEachOther) {
  at::Tensor ids = random_ids(2, 9);
  at::Tensor documents =
      at::tensor({0, 0, 0, 1, 2, 2, 2, 2, 2, 7, 7, 7, 7, 7, 7, 8, 8, 8}, at::kLong);
  documents = cumulative_lengths(documents.view({2, 9}));
  at::Tensor together = model_->logits({.ids = ids, .documents = documents});
  for (auto [begin, end] : {std::pair(0, 3), std::pair(3, 4), std::pair(4, 9)}) {
    at::Tensor others = random_ids(2, 9);  // the same document next to others
    others.slice(1, begin, end).copy_(ids.slice(1, begin, end));
    at::Tensor again = model_->logits({.ids = others, .documents = documents});
    expect_close(together[0].slice(0, begin, end), again[0].slice(0, begin, end),
                 "document from " + std::to_string(begin));
  }
  EXPECT_GT((together - model_->logits({.ids = ids})).abs().max().item<double>(), 0.1);
  if (dynamic_cast<LlamaImpl*>(model_.get())) {  // whose positions are relative
    at::Tensor alone = model_->logits({.ids = ids.slice(1, 6)});
    expect_close(together[1].slice(0, 6), alone[1], "a document alone");
  }
}

// With and without a window, and beyond LongRoPE's original context.
TEST_P(Attention, DocumentsWithPositionsOfTheirOwnScoreAsAlone) {
  auto small = [](DecoderConfig config) {
    config.vocab = kVocab;
    config.dim = 24;
    config.layers = 2;
    config.heads = 4;
    config.ffn = 40;
    return randomized(Decoder(config).ptr());
  };
  DecoderConfig mistral = of_family(Family::kMistral, {.window = 3});
  DecoderConfig phi3 = of_family(Family::kPhi3, {});
  phi3.long_rope = LongRope{.short_factors = {1, 1.5, 2},
                            .long_factors = {4, 5, 6},
                            .original_max_position_embeddings = 5,
                            .max_position_embeddings = 100};
  for (const Model& model : {model_, small(mistral), small(phi3)}) {
    at::Tensor ids = random_ids(2, 12), numbers = at::zeros({2, 12}, at::kLong);
    numbers[0].slice(0, 4).fill_(1);
    numbers[0].slice(0, 11).fill_(2);
    at::Tensor logits = model->logits({.ids = ids,
                                       .documents = cumulative_lengths(numbers, /*room=*/5),
                                       .restart_positions = true});
    for (auto [row, begin, end] : {std::tuple(0, 0, 4), {0, 4, 11}, {0, 11, 12}, {1, 0, 12}})
      expect_close(logits[row].slice(0, begin, end),
                   model->logits({.ids = ids[row].slice(0, begin, end).unsqueeze(0)})[0],
                   std::to_string(row) + " from " + std::to_string(begin));
  }
}

TEST(AttentionPlan, DocumentsNeedNoMask) {
  at::Tensor ids = random_ids(2, 4), numbers = at::tensor({0, 0, 1, 1, 5, 5, 5, 6}, at::kLong);
  at::Tensor documents = cumulative_lengths(numbers.view({2, 4}), /*room=*/3);
  EXPECT_TRUE(at::equal(documents, at::tensor({0, 2, 4, 4, 7, 8, 8}, at::kInt)));
  Attending plan =
      plan_attention({.ids = ids, .documents = documents, .restart_positions = true}, 1);
  EXPECT_FALSE(plan.mask.defined());
  EXPECT_TRUE(at::equal(plan.positions, at::tensor({0, 1, 0, 1, 0, 1, 2, 0}).view({2, 4})));
  EXPECT_TRUE(at::equal(plan.lengths, at::tensor({2, 2, 2, 2, 3, 3, 3, 1}).view({2, 4})));
  EXPECT_FALSE(plan_attention({.ids = ids, .documents = documents}, 1).positions.defined());
  expect_error(
      [&] {
        cumulative_lengths(numbers.view({2, 4}), 1);
      },
      "2 documents in a sequence, but room for 1");
  expect_error([&] { plan_attention({.ids = ids, .padding = ids, .documents = documents}, 1); },
               "padding and documents");
}

TEST_P(Attention, OneDocumentOrNoPaddingChangesNothing) {
  at::Tensor ids = random_ids(2, 7), plain = model_->logits({.ids = ids});
  at::Tensor one = cumulative_lengths(at::zeros_like(ids));
  expect_close(model_->logits({.ids = ids, .documents = one}), plain, "documents");
  expect_close(model_->logits({.ids = ids, .padding = at::ones({2, 7}, at::kBool)}), plain,
               "padding");
}

// --- losses ---

TEST_P(Attention, LossSumCountsTargetsThatAreNotMasked) {
  at::Tensor ids = random_ids(2, 6), targets = random_ids(2, 6);
  double all = model_->loss_sum({.ids = ids}, targets).item<double>();
  EXPECT_NEAR(all, 12 * model_->forward(ids, targets).item<double>(), 1e-4);
  targets[1].slice(0, 2).fill_(-100);
  at::Tensor scores = model_->logits({.ids = ids}).to(at::kDouble).log_softmax(-1);
  double expected = 0;
  for (auto [row, token] :
       {std::pair(0, 0), {0, 1}, {0, 2}, {0, 3}, {0, 4}, {0, 5}, {1, 0}, {1, 1}})
    expected -= scores[row][token][targets[row][token].item<int64_t>()].item<double>();
  EXPECT_NEAR(model_->loss_sum({.ids = ids}, targets).item<double>(), expected, 1e-4);
  EXPECT_NEAR(model_->forward(ids, targets).item<double>(), expected / 8, 1e-5);
  targets.fill_(-100);
  EXPECT_EQ(model_->loss_sum({.ids = ids}, targets).item<double>(), 0);  // and no division by 0
}

TEST_P(Attention, InputsOfTheWrongShapeAreRefused) {
  at::Tensor ids = random_ids(2, 4);
  expect_error([&] { model_->logits({.ids = ids[0]}); }, "int64 [batch, tokens]");
  expect_error([&] { model_->logits({.ids = ids.to(at::kFloat)}); }, "int64 [batch, tokens]");
  expect_error([&] { model_->logits({}); }, "int64 [batch, tokens]");
  expect_error([&] { model_->logits({.ids = ids, .padding = ids.slice(1, 1)}); },
               "padding of shape [2, 3] doesn't match ids of shape [2, 4]");
  expect_error([&] { model_->logits({.ids = ids, .documents = ids}); },
               "documents of shape [2, 4]");
}

TEST(Gpt2Positions, ASequenceLongerThanItsPositionsIsRefused) {
  torch::NoGradGuard no_grad;
  Model model = gpt2();
  EXPECT_EQ(model->max_tokens(), 150);
  expect_error([&] { model->logits({.ids = random_ids(1, 151)}); }, "151 tokens");
  KVCache cache(model->layers());
  model->logits({.ids = random_ids(1, 150), .cache = &cache});
  expect_error([&] { model->logits({.ids = random_ids(1, 1), .cache = &cache}); }, "151 tokens");
}

}  // namespace
}  // namespace fsdp::models
