#include "train/training.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <torch/utils.h>

#include <algorithm>
#include <cctype>
#include <cmath>

#include "base/format.h"
#include "base/log.h"
#include "fsdp/checkpoint.h"
#include "fsdp/error.h"
#include "fsdp/init_parameters.h"
#include "fsdp/mesh.h"
#include "fsdp/nn/quantised.h"
#include "train/init_from.h"
#include "train/kept_config.h"
#include "train/matrices.h"
#include "train/owner.h"

namespace fsdp::train {
namespace {

Wire wire_of(shard::Gather gather) {
  if (gather == shard::Gather::kPlain) return Wire::PLAIN;
  return gather == shard::Gather::kFp8 ? Wire::FP8 : Wire::INT8;
}

// What gradients accumulate in, and how they travel.
void set_reduction(MixedPrecision& mixed, const shard::ShardConfig& shard) {
  using enum shard::Reduce;
  mixed.reduce_dtype = shard.reduce == kBf16   ? at::kBFloat16
                       : shard.reduce == kFp16 ? at::kHalf
                                               : at::kFloat;
  if (shard.strategy == ShardingStrategy::NO_SHARD) return;
  if (shard.reduce == kBf16) mixed.reduce = Wire::BF16;
  if (shard.reduce == kFp8) mixed.reduce = Wire::FP8;
  if (shard.reduce == kInt8) mixed.reduce = Wire::INT8;
}

MixedPrecision mixed_precision(const Config& config) {
  const shard::ShardConfig& shard = config.shard;
  MixedPrecision mixed;
  if (shard.precision != shard::Precision::kFp32) {
    mixed.param_dtype = dtype_of(shard.precision);
    mixed.frozen_masters = config.lora.rank == 0;
    if (shard.gradients != shard::Precision::kFp32) mixed.grad_dtype = dtype_of(shard.gradients);
  }
  set_reduction(mixed, shard);
  mixed.gather = wire_of(shard.gather);
  return mixed;
}

ReshardAfterForward reshard_of(const OrNumber<shard::Reshard>& reshard) {
  if (reshard.number > 0) return static_cast<int>(reshard.number);
  if (reshard == shard::Reshard::kAuto) return {};
  return reshard == shard::Reshard::kTrue;
}

}  // namespace

at::ScalarType dtype_of(shard::Precision precision) {
  if (precision == shard::Precision::kBf16 || precision == shard::Precision::kFp8)
    return at::kBFloat16;
  return precision == shard::Precision::kFp16 ? at::kHalf : at::kFloat;
}

void resolve_precision(shard::ShardConfig& shard, bool gpu) {
  if (shard.precision == shard::Precision::kAuto)
    shard.precision = gpu ? shard::Precision::kBf16 : shard::Precision::kFp32;
}

ShardOptions shard_options(const World& world, const Config& config, const TrainTask& task) {
  const shard::ShardConfig& shard = config.shard;
  ShardOptions options{.strategy = shard.strategy,
                       .mixed_precision = mixed_precision(config),
                       .reshard_after_forward = reshard_of(shard.reshard_after_forward),
                       .device = world.device(),
                       .forward_prefetch = static_cast<int>(shard.forward_prefetch),
                       .backward_prefetch = static_cast<int>(shard.backward_prefetch),
                       .limit_all_gathers = shard.limit_all_gathers,
                       .offload = {.parameters = config.offload.parameters,
                                   .gradients = config.offload.gradients,
                                   .optimizer = config.offload.optimizer,
                                   .fraction = config.offload.fraction,
                                   .directory = config.offload.directory},
                       .share_host_memory = shard.share_host_memory};
  if (shard.wrap == shard::WrapBy::kBlock) options.wrap = task.blocks;
  if (shard.wrap == shard::WrapBy::kSize) options.wrap = wrap::min_params(shard.wrap_min_params);
  if (options.strategy == ShardingStrategy::HYBRID_SHARD) {
    int ranks = shard.shard_ranks > 0 ? static_cast<int>(shard.shard_ranks) : world.local_size();
    options.mesh = DeviceMesh(world, {{"replicate", world.size() / ranks}, {"shard", ranks}});
  }
  return options;
}

std::optional<RecomputePolicy> activation_policy(const memory::ActivationsConfig& activations,
                                                 const TrainTask& task) {
  using enum memory::ActivationsMode;
  RecomputeOptions options{.every = static_cast<int>(activations.every),
                           .keep_last = static_cast<int>(activations.keep_last)};
  if (activations.mode == kNone) return std::nullopt;
  // fsdp::nn layers already recompute what is cheap. The widest product is the next candidate: its
  // inputs take a fraction of its memory.
  if (activations.mode == kFeedForward && !task.feed_forwards)
    throw Error(
        "activations.mode = feed_forward, but the model's blocks have no feed-forward part.",
        "set it to full, offload or none.");
  if (activations.mode == kFeedForward) return RecomputePolicy(task.feed_forwards, options);
  if (activations.mode == kSelective) options.mode = Recompute::SELECTIVE;
  if (activations.mode == kOffload) options.mode = Recompute::OFFLOAD;
  if (activations.mode == kLong) options.mode = Recompute::FULL_OFFLOAD;
  return RecomputePolicy(task.blocks, options);
}

Sharded shard_task(const World& world, const Config& config, const TrainTask& task,
                   bool initialize) {
  ShardOptions options = shard_options(world, config, task);
  options.initialize = initialize;
  Sharded sharded = fully_shard(task.module, options);
  if (auto policy = activation_policy(config.activations, task))
    apply_activation_checkpointing(sharded, *policy);
  return sharded;
}

std::unique_ptr<Optimizer> make_optimizer(const Config& config, const Sharded& sharded) {
  const optim::OptimConfig& optim = config.optim;
  if (optim.type == optim::OptimizerType::kMuon)
    return std::make_unique<Muon>(
        sharded,
        MuonOptions{.lr = optim.lr,
                    .momentum = optim.muon_momentum,
                    .weight_decay = optim.weight_decay,
                    .newton_schulz = optim.muon_polynomials == optim::Polynomials::kQuintic
                                         ? NewtonSchulz::QUINTIC
                                         : NewtonSchulz::POLAR_EXPRESS,
                    .steps = static_cast<int>(optim.muon_steps),
                    .matrices = matrix_parameters(config),
                    .adamw = {.lr = optim.muon_rest_lr > 0 ? std::optional(optim.muon_rest_lr)
                                                           : std::nullopt,
                              .betas = {optim.beta1, optim.beta2},
                              .eps = optim.eps,
                              .groups = {no_decay()}}});
  if (optim.type == optim::OptimizerType::kSgd)
    return std::make_unique<SGD>(sharded, SGDOptions{.lr = optim.lr,
                                                     .momentum = optim.momentum,
                                                     .weight_decay = optim.weight_decay,
                                                     .groups = {no_decay()}});
  return std::make_unique<AdamW>(sharded, AdamWOptions{.lr = optim.lr,
                                                       .betas = {optim.beta1, optim.beta2},
                                                       .eps = optim.eps,
                                                       .weight_decay = optim.weight_decay,
                                                       .groups = {no_decay()}});
}

namespace {

LRSchedule schedule_of(const optim::OptimConfig& optim, int64_t steps) {
  const bool decays = optim.schedule == optim::ScheduleType::kWsd;
  const int64_t most = std::max<int64_t>(0, steps - (decays ? optim.decay_steps : 0));
  const auto share = std::ceil(optim.warmup_share * static_cast<double>(steps));
  const int64_t warmup =
      optim.warmup_steps > 0 ? optim.warmup_steps : std::min(most, static_cast<int64_t>(share));
  ScheduleOptions options{.total_steps = steps,
                          .warmup_steps = std::min(warmup, steps),
                          .final_ratio = optim.final_ratio};
  switch (optim.schedule) {
    case optim::ScheduleType::kLinear:
      return LRSchedule::linear(options);
    case optim::ScheduleType::kCosine:
      return LRSchedule::cosine(options);
    case optim::ScheduleType::kWsd:
      options.decay_steps = optim.decay_steps;
      return LRSchedule::wsd(options);
    case optim::ScheduleType::kConstant:
      break;
  }
  return LRSchedule::constant({.warmup_steps = options.warmup_steps});
}

int64_t total_steps(const Config& config, const Corpus& corpus, int64_t tokens_per_sample) {
  const TrainConfig& train = config.train;
  auto whole = [](double steps) { return std::max<int64_t>(1, std::llround(std::ceil(steps))); };
  double batch = static_cast<double>(train.batch);
  if (train.tokens > 0)
    return whole(static_cast<double>(train.tokens) / (batch * double(tokens_per_sample)));
  if (train.epochs > 0)
    return whole(train.epochs * static_cast<double>(corpus.samples_per_epoch()) / batch);
  return train.steps;
}

at::Tensor state_of(at::Device device) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_state(at::Device device, const at::Tensor& state) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

// Gives each rank its own random state, after the model was built from the shared seed.
void seed_rank(const World& world, int64_t seed, int64_t step) {
  torch::manual_seed(static_cast<uint64_t>(seed) * 1'000'003 + 7919 * step + world.rank());
}

bool is_base(const std::string& name) {
  return !nn::is_adapter(name);
}

// Values to begin with. A resumed run loads its own checkpoint later, which has all of them but the
// base of adapters.
void init_weights(Training& training) {
  const Config& config = training.config;
  const bool lora = config.lora.rank > 0;
  if (lora || (!config.resumes && config.init_from.empty()))
    init_parameters(training.sharded, static_cast<uint64_t>(config.train.seed),
                    lora ? nn::adapter_start : training.task.initial);
  if (!config.init_from.empty() && (lora || !config.resumes))
    checkpoint::load(find_origin(config.init_from).weights, training.sharded, nullptr,
                     {.only = lora ? is_base : checkpoint::Chosen(),
                      .made_of = nn::quantised_rows(*training.task.module)});
  if (!config.lora.init_from.empty() && !config.resumes)
    checkpoint::load(config.lora.init_from, training.sharded, nullptr, {.only = nn::is_adapter});
}

// Pairs of answers are for DPO, and for nothing else.
void check_pairs(const Training& training) {
  const auto packed = training.corpus->packed();
  const bool pairs = packed && packed->pairs;
  if (pairs == (training.config.train.objective == Objective::kDpo)) return;
  throw Error(pairs
                  ? "data.train has pairs of answers, which only train.objective = dpo learns from."
                  : "train.objective is dpo, but data.train has no pairs of answers.",
              pairs ? "leave train.objective out, or use data with one answer per line."
                    : "pass JSON lines with \"chosen\" and \"rejected\" (docs/data.md).");
}

// The operations that documents need: no attention between them, and nothing for padding.
void count_packed(TrainTask& task, const Packed& packed) {
  const auto seq = static_cast<double>(task.tokens_per_sample);
  const double whole = task.text->flops_per_token(task.tokens_per_sample);
  const double packed_tokens =
      task.text->flops_per_token(std::llround(std::max(packed.usual_length, 1.0)));
  task.flops_per_sample -= (whole - packed_tokens) * seq;
  task.flops_per_sample *= 1 - packed.padding;
}

// The states that a run begins with instead of fresh ones.
void init_states(Training& training) {
  const Config& config = training.config;
  if (config.optim_from.empty() || config.resumes) return;
  checkpoint::LoadOptions states = load_options(config);
  states.model = false;
  checkpoint::load(find_checkpoint(config.optim_from).checkpoint, training.sharded,
                   training.optimizer.get(), states);
}

int64_t integer(const checkpoint::Extra& extra, const std::string& key,
                const std::filesystem::path& from) {
  auto found = extra.find(key);
  if (found == extra.end() || !std::holds_alternative<int64_t>(found->second))
    throw Error(formatted("{} doesn't hold the state of a run: \"{}\" is missing.", from, key),
                "fsdp train didn't write it; --init-from starts a new run from its weights.");
  return std::get<int64_t>(found->second);
}

// Earlier versions held out the tail of the data. Under today's rule, such a run would be trained
// on its validation samples from here on, and validated on samples it has seen.
void check_split(const Training& training, const checkpoint::Extra& extra,
                 const std::filesystem::path& from) {
  std::string rule = training.corpus->split_rule();
  if (rule.empty()) return;
  auto found = extra.find("split");
  const auto* saved = found == extra.end() ? nullptr : std::get_if<std::string>(&found->second);
  if (saved && *saved == rule) return;
  throw Error(formatted("{} was saved by a version that held out other samples for validation, so "
                        "this run can't be resumed: it would train on its validation data.",
                        from),
              formatted("finish it with that version, or start a new run from its weights: fsdp "
                        "train --init-from {}.",
                        training.directory.root));
}

}  // namespace

ShardingStrategy parse_strategy(const std::string& name) {
  std::string lower = name;
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return c == '-' ? '_' : std::tolower(c); });
  if (auto strategy = parse_enum<ShardingStrategy>(lower)) return *strategy;
  throw Error(formatted("there is no sharding strategy \"{}\".", name),
              "choose FULL_SHARD, SHARD_GRAD_OP, NO_SHARD or HYBRID_SHARD.");
}

RandomState random_state(at::Device device) {
  return {.cpu = state_of(at::kCPU), .device = device.is_cpu() ? at::Tensor() : state_of(device)};
}

void set_random_state(at::Device device, const RandomState& state) {
  if (state.cpu.defined()) set_state(at::kCPU, state.cpu);
  if (state.device.defined() && !device.is_cpu()) set_state(device, state.device);
}

Training assemble(const World& world, const Config& config, const RunDirectory& directory) {
  Training training{.world = world, .config = config, .directory = directory};
  Config& chosen = training.config;
  resolve_precision(chosen.shard, !world.device().is_cpu());
  check_precision(chosen.shard);  // again, because "auto" is resolved now
  if (!chosen.offload.directory.empty() && chosen.checkpoint.async) {
    chosen.checkpoint.async = false;
    if (world.rank() == 0)
      log::info(
          "checkpoint.async is off: its copies would take the memory that offload.directory "
          "saves.");
  }
  if (chosen.activations.mode == memory::ActivationsMode::kSelective && world.rank() == 0)
    log::info(
        "activations.mode = selective saves nothing here: the layers of these models recompute "
        "norms and activations anyway. feed_forward saves memory.");
  if (chosen.activations.mode == memory::ActivationsMode::kLong && world.rank() == 0)
    log::info(
        formatted("activations.mode = long: blocks are recomputed from inputs in host memory, "
                  "feed-forward layers in tiles of {} tokens (activations.tile).",
                  memory::tile_of(chosen.activations)));
  training.corpus = open_corpus(chosen, (directory.root / "tokens").string());
  check_pairs(training);
  if (chosen.model.vocab == 0) chosen.model.vocab = training.corpus->vocab();
  if (training.corpus->vocab() > chosen.model.vocab && chosen.model.type != models::ModelType::kMlp)
    throw Error(formatted("model.vocab is {}, but the tokenizer has {} tokens.", chosen.model.vocab,
                          training.corpus->vocab()),
                chosen.init_from.empty()
                    ? formatted("pass --model.vocab {} or more; 0 takes the tokenizer's size.",
                                training.corpus->vocab())
                    : "the weights have no rows for the other tokens: pass the --data.tokenizer "
                      "that the model was trained with, or add the rows in Python.");

  training.context = context_of(world, chosen);
  training.task = make_unfilled_task(chosen, chosen.model.vocab, training.context);
  if (!training.task.fp8.empty() && world.rank() == 0) log::info(training.task.fp8);
  place_tally(training.task, world.device());
  if (const auto packed = training.corpus->packed()) count_packed(training.task, *packed);
  training.sharded = shard_task(world, chosen, training.task, /*initialize=*/false);
  init_weights(training);
  if (world.size() > 1)  // losses are already divided by the number of targets over all ranks
    training.sharded.set_gradient_divide_factor(1.0);
  training.sharded.measure_exposed(true);
  training.optimizer = make_optimizer(chosen, training.sharded);
  init_states(training);
  if (chosen.shard.precision == shard::Precision::kFp16 && chosen.optim.grad_scaler)
    training.scaler = std::make_unique<GradScaler>();
  training.steps = total_steps(chosen, *training.corpus, training.task.tokens_per_sample);
  training.scheduler =
      std::make_unique<LRScheduler>(*training.optimizer, schedule_of(chosen.optim, training.steps));
  seed_rank(world, chosen.train.seed, 0);
  return training;
}

namespace {

checkpoint::IfBusy if_busy(checkpoint::WhenBusy when) {
  switch (when) {
    case checkpoint::WhenBusy::kSkip:
      return checkpoint::IfBusy::SKIP;
    case checkpoint::WhenBusy::kWait:
      return checkpoint::IfBusy::WAIT;
    case checkpoint::WhenBusy::kQueue:
      return checkpoint::IfBusy::QUEUE;
  }
  return checkpoint::IfBusy::WAIT;
}

}  // namespace

checkpoint::SaveOptions save_options(const Training& training, const RunState& state) {
  auto tokenizer = training.corpus->tokenizer();
  checkpoint::SaveOptions options;
  options.extra = {{"step", state.step},
                   {"position", state.position},
                   {"tokens", state.tokens},
                   {"skipped", state.skipped},
                   {"seq", training.config.data.seq},
                   {"seed", training.config.train.seed},
                   {"samples_per_epoch", training.corpus->samples_per_epoch()},
                   {"split", training.corpus->split_rule()},
                   {"tokenizer", tokenizer ? tokenizer->name() : std::string()},
                   {"config", kept_toml(training.config)}};
  if (training.scaler) {
    options.extra["scale"] = training.scaler->state().scale;
    options.extra["scale_good_steps"] = training.scaler->state().good_steps;
  }
  if (training.config.lora.rank > 0) options.only = nn::is_adapter;
  RandomState random = random_state(training.world.device());
  options.per_rank["random_cpu"] = random.cpu;
  if (random.device.defined()) options.per_rank["random_device"] = random.device;
  return options;
}

bool save(Training& training, const RunState& state, bool must) {
  checkpoint::SaveOptions options = save_options(training, state);
  options.keep_last = training.config.checkpoint.keep_last;
  if (const auto owner = training.owner)
    options.owner = {.epoch = owner->epoch(), .check = [owner] { owner->check(); }};
  if (!must) options.if_busy = if_busy(training.config.checkpoint.when_busy);
  auto dir = training.directory.checkpoint(state.step);
  if (!training.config.checkpoint.async) {
    checkpoint::save(dir, training.sharded, training.optimizer.get(), options);
    return true;
  }
  auto saving = checkpoint::save_async(dir, training.sharded, training.optimizer.get(), options);
  if (saving.skipped()) return false;
  training.saving = std::move(saving);
  return true;
}

int64_t steps_done(const std::filesystem::path& checkpoint) {
  return integer(checkpoint::read_extra(checkpoint), "step", checkpoint);
}

checkpoint::LoadOptions load_options(const Config& config) {
  checkpoint::LoadOptions options;
  if (config.lora.rank > 0) options.only = nn::is_adapter;
  return options;
}

RunState restore(Training& training, const std::filesystem::path& from) {
  checkpoint::Loaded loaded = checkpoint::load(from, training.sharded, training.optimizer.get(),
                                               load_options(training.config));
  RunState state{.step = integer(loaded.extra, "step", from),
                 .position = integer(loaded.extra, "position", from),
                 .tokens = integer(loaded.extra, "tokens", from),
                 .skipped = integer(loaded.extra, "skipped", from)};
  int64_t seq = integer(loaded.extra, "seq", from);
  if (seq != training.config.data.seq)
    throw Error(formatted("data.seq was {} and is now {}: samples would be cut at other places, "
                          "so the run can't be resumed.",
                          seq, training.config.data.seq),
                formatted("resume with --data.seq {}.", seq));
  check_split(training, loaded.extra, from);
  bool same_order =
      integer(loaded.extra, "seed", from) == training.config.train.seed &&
      integer(loaded.extra, "samples_per_epoch", from) == training.corpus->samples_per_epoch();
  if (!same_order && training.world.rank() == 0)
    log::warn(
        formatted("the seed or the data changed since {} was saved: samples come in another "
                  "order from here on, and some repeat.",
                  from));
  training.scheduler->set_steps(state.step);
  if (training.scaler && loaded.extra.contains("scale"))
    training.scaler->load_state({std::get<double>(loaded.extra.at("scale")),
                                 integer(loaded.extra, "scale_good_steps", from)});
  // With another number of ranks there is no saved state for each rank; dropout then differs
  // anyway.
  seed_rank(training.world, training.config.train.seed, state.step);
  auto saved = [&](const std::string& key) -> at::Tensor {
    const int64_t size = training.world.size();
    const auto own = loaded.per_rank.find(key), all = loaded.extra.find(key + "_of_ranks");
    if (own != loaded.per_rank.end()) {
      const auto* state = std::get_if<at::Tensor>(&own->second);
      return state ? *state : at::Tensor();
    }
    if (all == loaded.extra.end()) return {};  // only checkpoints in memory have it
    const auto* states = std::get_if<at::Tensor>(&all->second);
    const bool fits = states && states->dim() == 2 && states->size(0) == size;
    return fits ? states->select(0, training.world.rank()).clone() : at::Tensor();
  };
  const RandomState random{.cpu = saved("random_cpu"), .device = saved("random_device")};
  set_random_state(training.world.device(), random);
  return state;
}

}  // namespace fsdp::train
