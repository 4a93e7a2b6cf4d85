#include "train/plan_config.h"

#include <ATen/ops/empty.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <cctype>

#include "base/format.h"
#include "fsdp/tokenizer.h"
#include "train/device.h"
#include "train/task.h"
#include "train/training.h"

namespace fsdp::train {
namespace {

int64_t vocab_of(const Config& config) {
  if (config.model.type == models::ModelType::kMlp || config.model.vocab > 0)
    return config.model.vocab;
  if (config.data.tokenizer == "bytes") return 257;
  return data::Tokenizer::load(config.data.tokenizer)->vocab_size();
}

Samples samples_for(const Config& config, const PlanStep& step) {
  auto made = [&](int64_t width, at::ScalarType type) {
    return at::empty({step.batch, width}, at::TensorOptions(type).device(step.device));
  };
  Samples samples{.count = step.batch};
  bool text = config.model.type != models::ModelType::kMlp;
  int64_t width = text ? config.data.seq / config.context.size : config.model.width;
  samples.inputs = made(width, text ? at::kLong : at::kFloat);
  samples.targets = made(width, text ? at::kLong : at::kFloat);
  if (text && (config.data.document_mask || config.data.packing))
    samples.lengths =
        at::empty({2 * step.batch + 1}, at::TensorOptions(at::kInt).device(step.device));
  return samples;
}

// `part` > 0: one sequence, of this many tokens per sample of the plan.
PlanModel plan_model_of(const Config& config, int64_t vocab, const Context& context,
                        int64_t part = 0) {
  return [config, vocab, context, part] {
    TrainTask task = make_task(config, vocab, context);
    return PlanSubject{task.module, [task, config, part](const PlanStep& step) {
                         if (part == 0) return task.loss_sum(samples_for(config, step));
                         Config longer = config;
                         longer.data.seq = part * step.batch;
                         return task.loss_sum(samples_for(longer, {1, step.device}));
                       }};
  };
}

}  // namespace

ConfigPlan plan_of(const Config& given, int world, std::optional<Gpu> gpu, int ranks_per_node) {
  Config config = given;
  resolve_precision(config.shard, gpu.has_value());
  int64_t vocab = vocab_of(config);
  TrainTask known = make_unfilled_task(config, vocab);
  ConfigPlan plan;
  plan.title = formatted("{}, computed in {}", known.title, enum_name(config.shard.precision));
  plan.tokens_per_sample = known.tokens_per_sample / config.context.size;
  if (config.lora.rank > 0) {  // masters and states in float32
    const int states = config.optim.type == optim::OptimizerType::kAdamW ? 2 : 1;
    plan.adapters_saved = 4.0 * (1 + states) * static_cast<double>(known.trained) / world;
  }
  const World ranks = fake_world(world, std::min(ranks_per_node, world));
  plan.model = plan_model_of(config, vocab, context_of(ranks, config));
  PlanOptions& options = plan.options;
  options.ranks_per_node = ranks_per_node;
  options.shard_ranks = static_cast<int>(config.shard.shard_ranks);
  options.world = world;
  options.ranks_per_node = std::min(options.ranks_per_node, world);
  options.shard = shard_options(ranks, config, known);
  options.gpu = std::move(gpu);
  set_recompute(options, config.activations);
  options.recompute_modules = known.blocks;
  if (config.model.type != models::ModelType::kMlp) options.inner_modules = known.feed_forwards;
  int64_t share = std::max<int64_t>(1, config.train.batch / parts_of_batch(config, world));
  options.batch = config.train.micro_batch > 0 ? std::min(config.train.micro_batch, share) : share;
  options.micro_batches = static_cast<int>((share + options.batch - 1) / options.batch);
  options.clip = 1.0;  // the norm is always computed
  options.optimizer = [config](const Sharded& sharded) { return make_optimizer(config, sharded); };
  return plan;
}

ConfigPlan plan_of_sequences(const Config& given, int world, Gpu gpu, int ranks_per_node) {
  if (given.model.type == models::ModelType::kMlp || given.model.type == models::ModelType::kGpt2)
    throw Error(formatted("a model of type {} has no longest sequence to plan: {}.",
                          enum_name(given.model.type),
                          given.model.type == models::ModelType::kMlp
                              ? "it reads no sequences"
                              : "its learned positions fix the length"),
                "leave out --max-seq, or plan a model with rotary positions.");
  if (given.context.size > 1)
    throw Error(formatted("--max-seq plans whole sequences, not parts of them (context.size = {}).",
                          given.context.size),
                "leave out context.size: it answers how many tokens one rank can hold.");
  Config config = given;
  config.train.micro_batch = 1;
  ConfigPlan plan = plan_of(config, world, std::move(gpu), ranks_per_node);
  resolve_precision(config.shard, /*gpu=*/true);
  plan.model = plan_model_of(config, vocab_of(config), /*context=*/{}, kSequencePart);
  plan.tokens_per_sample = kSequencePart;
  plan.options.batch = 0;  // any
  return plan;
}

std::optional<Gpu> gpu_of(at::Device device) {
  if (device.is_cpu()) return {};
  std::string name = device_name(device);
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  auto [free, total] = c10::getDeviceAllocator(device.type())->getMemoryInfo(device.index());
  auto memory = static_cast<int64_t>(total);
  auto named = [&](const Gpu& known) {
    return name.find(known.name.substr(0, known.name.find('-'))) != std::string::npos;
  };
  Gpu found = gpu("h100");
  for (const Gpu& known : known_gpus()) {
    bool nearer = std::abs(known.memory - memory) < std::abs(found.memory - memory);
    if (named(known) && (nearer || !named(found))) found = known;
  }
  found.memory = memory;
  return found;
}

void set_recompute(PlanOptions& options, const memory::ActivationsConfig& activations) {
  using enum memory::ActivationsMode;
  const memory::ActivationsMode mode = activations.mode;
  if (mode != kNone)
    options.recompute = mode == kOffload     ? Recompute::OFFLOAD
                        : mode == kLong      ? Recompute::FULL_OFFLOAD
                        : mode == kSelective ? Recompute::SELECTIVE
                                             : Recompute::FULL;
  options.recompute.inner = mode == kFeedForward;
  options.every = static_cast<int>(activations.every);
  options.keep_last = static_cast<int>(activations.keep_last);
}

memory::ActivationsMode activations_mode(const PlanRecompute& recompute) {
  using enum memory::ActivationsMode;
  if (!recompute.mode) return kNone;
  if (recompute.inner) return kFeedForward;
  switch (*recompute.mode) {
    case Recompute::FULL:
      return kFull;
    case Recompute::SELECTIVE:
      return kSelective;
    case Recompute::OFFLOAD:
      return kOffload;
    case Recompute::FULL_OFFLOAD:
      return kLong;
  }
  return kNone;
}

SurveyOptions survey_options() {
  SurveyOptions survey;
  // For fsdp::nn layers it is the same as none.
  std::erase(survey.recompute, PlanRecompute(Recompute::SELECTIVE));
  return survey;
}

}  // namespace fsdp::train
