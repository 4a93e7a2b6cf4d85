#include "train/plan_config.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "fsdp/tokenizer.h"
#include "train/trainee.h"
#include "train/training.h"

namespace fsdp::train {
namespace {

int64_t vocab_of(const Config& config) {
  if (config.model.type == "mlp" || config.model.vocab > 0) return config.model.vocab;
  if (config.data.tokenizer == "bytes") return 257;
  return data::Tokenizer::load(config.data.tokenizer)->vocab_size();
}

Samples samples_for(const Config& config, const PlanStep& step) {
  auto made = [&](int64_t width, at::ScalarType type) {
    return at::empty({step.batch, width}, at::TensorOptions(type).device(step.device));
  };
  Samples samples{.count = step.batch};
  bool text = config.model.type != "mlp";
  int64_t width = text ? config.data.seq : config.model.width;
  samples.inputs = made(width, text ? at::kLong : at::kFloat);
  samples.targets = made(width, text ? at::kLong : at::kFloat);
  if (text && config.data.document_mask) samples.documents = made(width, at::kLong);
  return samples;
}

}  // namespace

ConfigPlan plan_of(const Config& given, int world, std::optional<Gpu> gpu, int ranks_per_node) {
  Config config = given;
  if (config.shard.precision == "auto") config.shard.precision = gpu ? "bf16" : "fp32";
  int64_t vocab = vocab_of(config);
  Trainee known = make_unfilled_trainee(config, vocab);
  ConfigPlan plan;
  plan.title = known.title + ", computed in " + config.shard.precision;
  plan.tokens_per_sample = known.tokens_per_sample;
  plan.model = [config, vocab] {
    Trainee trainee = make_trainee(config, vocab);
    return PlanSubject{trainee.module, [trainee, config](const PlanStep& step) {
                         return trainee.loss_sum(samples_for(config, step));
                       }};
  };
  PlanOptions& options = plan.options;
  options.ranks_per_node = ranks_per_node;
  options.shard_ranks = static_cast<int>(config.shard.shard_ranks);
  options.world = world;
  options.ranks_per_node = std::min(options.ranks_per_node, world);
  options.shard = shard_options(fake_world(world, options.ranks_per_node), config, known);
  options.gpu = std::move(gpu);
  const std::string& mode = config.activations.mode;
  if (mode != "none")
    options.recompute = mode == "offload"     ? Recompute::OFFLOAD
                        : mode == "selective" ? Recompute::SELECTIVE
                                              : Recompute::FULL;
  options.recompute.inner = mode == "feed_forward";
  options.recompute_modules = known.blocks;
  if (config.model.type != "mlp") options.inner_modules = known.feed_forwards;
  options.every = static_cast<int>(config.activations.every);
  options.keep_last = static_cast<int>(config.activations.keep_last);
  int64_t share = std::max<int64_t>(1, config.train.batch / world);
  options.batch = config.train.micro_batch > 0 ? std::min(config.train.micro_batch, share) : share;
  options.micro_batches = static_cast<int>((share + options.batch - 1) / options.batch);
  options.clip = 1.0;  // the norm is taken in any case
  options.optimizer = [optim = config.optim](const Sharded& sharded) {
    return make_optimizer(optim, sharded);
  };
  return plan;
}

SurveyOptions survey_options() {
  SurveyOptions survey;
  // Of layers of fsdp::nn it is the same as none.
  std::erase(survey.recompute, PlanRecompute(Recompute::SELECTIVE));
  return survey;
}

}  // namespace fsdp::train
