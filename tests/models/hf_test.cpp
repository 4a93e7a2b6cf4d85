// Our models against Hugging Face's transformers: the same names and shapes, and with the same
// weights the same logits, gradients and generated tokens. export_hf.py computes the transformers
// side once for all tests.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <torch/csrc/api/include/torch/serialize.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/subprocess.h"
#include "fsdp/error.h"
#include "fsdp/models.h"
#include "fsdp/nn/lora.h"
#include "paths.h"
#include "train/preference.h"

namespace fsdp::models {
namespace {

using Tensors = std::map<std::string, at::Tensor>;

// One dict of the exported file.
class Exported {
 public:
  explicit Exported(c10::IValue value) : dict_(value.toGenericDict()) {}

  bool has(const std::string& key) const { return dict_.contains(key); }
  c10::IValue operator[](const std::string& key) const { return dict_.at(key); }
  at::Tensor tensor(const std::string& key) const {
    return has(key) ? dict_.at(key).toTensor() : at::Tensor();
  }
  Tensors tensors(const std::string& key) const {
    Tensors all;
    for (const auto& item : dict_.at(key).toGenericDict())
      all[item.key().toStringRef()] = item.value().toTensor();
    return all;
  }
  // Writes the value of `key`, if present, to `field`.
  void set(const std::string& key, int64_t& field) const {
    if (has(key)) field = dict_.at(key).toInt();
  }
  void set(const std::string& key, double& field) const {
    if (has(key)) field = dict_.at(key).toDouble();
  }
  void set(const std::string& key, bool& field) const {
    if (has(key)) field = dict_.at(key).toBool();
  }

 private:
  c10::impl::GenericDict dict_;
};

// The output of export_hf.py, or why there is none.
struct Export {
  c10::IValue cases;
  std::string missing;
};

Export run_export() {
  const char* python = std::getenv("FSDP_TEST_PYTHON");
  std::string folder = (std::filesystem::temp_directory_path() / "fsdp-hf-XXXXXX").string();
  if (!mkdtemp(folder.data())) return {.missing = "can't create a temporary folder"};
  std::string file = folder + "/models.pt";
  Finished finished =
      run_program({python ? python : "python3", paths::source("tests/models/export_hf.py"), file},
                  /*quiet=*/false);
  Export result;
  if (finished.code == 0) {
    std::ifstream in(file, std::ios::binary);
    std::vector<char> bytes{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
    result.cases = torch::pickle_load(bytes);
  } else if (finished.code == 77 || finished.code == 127) {
    result.missing = "no Python with transformers; set FSDP_TEST_PYTHON to one";
  } else {
    ADD_FAILURE() << "export_hf.py exited with " << finished.code;
  }
  std::filesystem::remove_all(folder);
  return result;
}

LlamaConfig llama_config(const Exported& exported) {
  LlamaConfig config;
  exported.set("vocab", config.vocab);
  exported.set("dim", config.dim);
  exported.set("layers", config.layers);
  exported.set("heads", config.heads);
  exported.set("kv_heads", config.kv_heads);
  exported.set("head_dim", config.head_dim);
  exported.set("ffn", config.ffn);
  exported.set("tied", config.tied);
  exported.set("norm_eps", config.norm_eps);
  exported.set("rope_base", config.rope_base);
  if (exported.has("scaling")) {
    Exported from(exported["scaling"]);
    RopeScaling& scaling = config.rope_scaling.emplace();
    from.set("factor", scaling.factor);
    from.set("low_freq_factor", scaling.low_freq_factor);
    from.set("high_freq_factor", scaling.high_freq_factor);
    from.set("original_max_position_embeddings", scaling.original_max_position_embeddings);
  }
  return exported.has("qwen2") ? qwen2(config) : config;
}

GPT2Config gpt2_config(const Exported& exported) {
  GPT2Config config;
  exported.set("vocab", config.vocab);
  exported.set("max_tokens", config.max_tokens);
  exported.set("dim", config.dim);
  exported.set("layers", config.layers);
  exported.set("heads", config.heads);
  exported.set("ffn", config.ffn);
  exported.set("norm_eps", config.norm_eps);
  return config;
}

class HuggingFace : public ::testing::TestWithParam<const char*> {
 protected:
  static const Export& exported() {
    static const Export result = run_export();
    return result;
  }

  void SetUp() override {
    if (!exported().missing.empty()) GTEST_SKIP() << exported().missing;
    ASSERT_TRUE(exported().cases.isGenericDict());
    theirs_ = std::make_unique<Exported>(Exported(exported().cases)[GetParam()]);
    Exported config((*theirs_)["config"]);
    if (config.has("json"))
      ours_ = Decoder(std::get<DecoderConfig>(
                          parse_hugging_face_config(config["json"].toStringRef(), GetParam())))
                  .ptr();
    else if (config.has("gpt2"))
      ours_ = GPT2(gpt2_config(config)).ptr();
    else
      ours_ = Llama(llama_config(config)).ptr();
    inputs_ = {.ids = theirs_->tensor("ids"), .padding = theirs_->tensor("padding")};
    if (theirs_->has("documents"))
      inputs_.documents = cumulative_lengths(theirs_->tensor("documents"));
  }

  // Loads their weights; names and shapes must match ours, with none left over on either side.
  void load() {
    Tensors weights = theirs_->tensors("weights");
    torch::NoGradGuard no_grad;
    auto tensors = ours_->named_parameters();
    tensors.update(ours_->named_buffers());
    for (auto& item : tensors) {
      auto found = weights.find(item.key());
      ASSERT_NE(found, weights.end()) << item.key() << " is unknown to transformers";
      ASSERT_EQ(item.value().sizes(), found->second.sizes()) << item.key();
      item.value().copy_(found->second);
      weights.erase(found);
    }
    for (const auto& [name, value] : weights) ADD_FAILURE() << name << " is unknown to us";
  }

  std::unique_ptr<Exported> theirs_;
  std::shared_ptr<CausalLMImpl> ours_;
  TextInputs inputs_;
};

double largest(const at::Tensor& difference) {
  return difference.abs().max().item<double>();
}

TEST_P(HuggingFace, LogitsAndGradientsAreTheSame) {
  ASSERT_NO_FATAL_FAILURE(load());
  at::Tensor logits = ours_->logits(inputs_), targets = theirs_->tensor("targets");
  at::Tensor difference = logits.detach() - theirs_->tensor("logits");
  if (inputs_.padding.defined()) {
    EXPECT_TRUE(logits.isfinite().all().item<bool>());
    difference = difference.index({inputs_.padding});
  }
  EXPECT_LE(largest(difference), 1e-5);

  at::Tensor loss = ours_->loss_sum(inputs_, targets) / targets.ne(-100).sum();
  EXPECT_NEAR(loss.item<double>(), theirs_->tensor("loss").item<double>(), 1e-5);
  loss.backward();
  size_t compared = 0;
  Tensors gradients = theirs_->tensors("gradients");
  for (auto& item : ours_->named_parameters()) {
    auto found = gradients.find(item.key());
    if (found == gradients.end()) continue;  // the second name of a tied parameter
    ASSERT_TRUE(item.value().grad().defined()) << item.key();
    EXPECT_LE(largest(item.value().grad() - found->second), 1e-4) << item.key();
    EXPECT_GT(largest(found->second), 1e-3) << item.key() << ": nothing to compare";
    ++compared;
  }
  EXPECT_EQ(compared, gradients.size());
}

class HuggingFaceUnmasked : public HuggingFace {};

TEST_P(HuggingFaceUnmasked, ForwardIsTheMeanLoss) {
  ASSERT_NO_FATAL_FAILURE(load());
  double loss = ours_->forward(inputs_.ids, theirs_->tensor("targets")).item<double>();
  EXPECT_NEAR(loss, theirs_->tensor("loss").item<double>(), 1e-5);
}

class HuggingFaceGeneration : public HuggingFace {};  // theirs can't continue right padding

TEST_P(HuggingFaceGeneration, GreedyTokensWithACacheAreTheSame) {
  ASSERT_NO_FATAL_FAILURE(load());
  torch::NoGradGuard no_grad;
  at::Tensor expected = theirs_->tensor("generated");
  KVCache cache(ours_->layers());
  at::Tensor logits =
      ours_->logits({.ids = inputs_.ids, .padding = inputs_.padding, .cache = &cache});
  std::vector<at::Tensor> made;
  for (int64_t i = 0; i < expected.size(1); ++i) {
    made.push_back(logits.select(1, logits.size(1) - 1).argmax(-1, /*keepdim=*/true));
    at::Tensor next = made.back();
    if (cache.tokens() == ours_->cache_limit()) {
      EXPECT_THROW(ours_->logits({.ids = next, .cache = &cache}), Error);
      cache.reset();
      next = at::cat({inputs_.ids, at::cat(made, 1)}, 1);
    }
    logits = ours_->logits({.ids = next, .cache = &cache});
  }
  EXPECT_TRUE(at::equal(at::cat(made, 1), expected)) << at::cat(made, 1) << expected;
}

// DPO's loss of packed pairs, the base being the model without its adapters.
class HuggingFacePreferences : public HuggingFace {};

TEST_P(HuggingFacePreferences, HaveTheLossAndTheRewardsOfTrl) {
  ASSERT_NO_FATAL_FAILURE(load());
  const int64_t rank = (*theirs_)["rank"].toInt();
  nn::add_lora(*ours_, {.rank = rank,
                        .alpha = (*theirs_)["alpha"].toDouble(),
                        .where = nn::named_linears({"q_proj", "down_proj"})});
  const Tensors adapters = theirs_->tensors("adapters"), gradients = theirs_->tensors("gradients");
  for (const auto& item : ours_->named_parameters())
    if (nn::is_adapter(item.key())) item.value().data().copy_(adapters.at(item.key()));

  constexpr int64_t kSeq = 32;  // two pairs in the first sample, one in the other
  train::Samples samples{.inputs = at::zeros({2, kSeq}, at::kLong),
                         .targets = at::full({2, kSeq}, -100, at::kLong),
                         .documents = at::zeros({2, kSeq}, at::kLong),
                         .room = 6,
                         .count = 2};
  const at::Tensor ids = theirs_->tensor("ids"), lengths = theirs_->tensor("lengths"),
                   prompts = theirs_->tensor("prompts");
  for (int64_t i = 0, at = 0; i < 6; ++i) {
    const int64_t row = i / 4, places = lengths[i].item<int64_t>() - 1;
    const int64_t known = prompts[i].item<int64_t>() - 1;
    if (i == 4) at = 0;
    const at::Tensor own = ids[i].slice(0, 0, places + 1);
    samples.inputs[row].slice(0, at, at + places).copy_(own.slice(0, 0, places));
    samples.targets[row].slice(0, at + known, at + places).copy_(own.slice(0, known + 1));
    at += places;
    samples.documents[row].slice(0, at).fill_(i % 4 + 1);
  }
  samples.lengths = cumulative_lengths(samples.documents, samples.room);
  at::Tensor tally = at::zeros({train::kPreferenceTallies}, at::kDouble);
  const at::Tensor loss =
      train::preference_loss(*ours_, samples, (*theirs_)["beta"].toDouble(), tally);
  EXPECT_NEAR(loss.item<double>() / 3, theirs_->tensor("loss").item<double>(), 1e-5);
  const at::Tensor rewards = theirs_->tensor("rewards").to(at::kDouble);
  EXPECT_EQ(tally[train::kPairs].item<double>(), 3);
  EXPECT_NEAR(tally[train::kChosenRewards].item<double>(),
              rewards.select(1, 0).sum().item<double>(), 1e-5);
  EXPECT_NEAR(tally[train::kRejectedRewards].item<double>(),
              rewards.select(1, 1).sum().item<double>(), 1e-5);
  EXPECT_EQ(tally[train::kRightOnes].item<double>(),
            rewards.select(1, 0).gt(rewards.select(1, 1)).sum().item<double>());
  loss.backward();
  for (const auto& [name, expected] : gradients) {
    const at::Tensor own = ours_->named_parameters()[name].grad() / 3;
    EXPECT_LE(largest(own - expected), 1e-5) << name;
    EXPECT_GT(largest(expected), 1e-4) << name << ": nothing to compare";
  }
}

INSTANTIATE_TEST_SUITE_P(Pairs, HuggingFacePreferences, ::testing::Values("preferences"));

std::string case_name(const ::testing::TestParamInfo<const char*>& info) {
  return info.param;
}

const auto kUnmasked = ::testing::Values(
    "llama", "llama_one_group", "llama_tied", "llama_head_dim", "llama_scaled", "qwen2", "qwen3",
    "mistral", "mistral_without_window", "smollm3", "olmo2", "phi3", "phi3_longrope",
    "phi3_longrope_longer", "phi3_partial", "phi3_partial_longrope", "qwen3_yarn",
    "qwen2_yarn_mscale", "llama_yarn_attention", "llama_linear", "gemma3", "gemma3_linear",
    "mixtral", "qwen3_moe", "olmoe", "dots1", "gpt2", "gpt2_ffn");
const auto kLeftPadded =
    ::testing::Values("llama_left_padded", "qwen2_tied_left_padded", "qwen3_tied_left_padded",
                      "mistral_left_padded", "smollm3_left_padded", "olmo2_left_padded",
                      "gemma3_left_padded", "mixtral_left_padded", "gpt2_left_padded");
const auto kOtherMasks = ::testing::Values(
    "llama_right_padded", "llama_documents", "mistral_right_padded", "mistral_documents",
    "gemma3_documents", "qwen3_moe_documents", "gpt2_right_padded", "gpt2_documents");

INSTANTIATE_TEST_SUITE_P(Unmasked, HuggingFace, kUnmasked, case_name);
INSTANTIATE_TEST_SUITE_P(LeftPadded, HuggingFace, kLeftPadded, case_name);
INSTANTIATE_TEST_SUITE_P(OtherMasks, HuggingFace, kOtherMasks, case_name);
INSTANTIATE_TEST_SUITE_P(Unmasked, HuggingFaceUnmasked, kUnmasked, case_name);
INSTANTIATE_TEST_SUITE_P(Unmasked, HuggingFaceGeneration, kUnmasked, case_name);
INSTANTIATE_TEST_SUITE_P(LeftPadded, HuggingFaceGeneration, kLeftPadded, case_name);

}  // namespace
}  // namespace fsdp::models
