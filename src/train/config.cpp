#include "train/config.h"

namespace fsdp::train {
namespace {

void describe_run(Config& config, OptionList& list) {
  list.section("", "The run");
  list.add("dir", config.dir, "Directory of the run; empty: runs/NAME, after the config's name");
  list.add("resume", config.resume, "Resume from the latest checkpoint in dir");
  list.add("take_over", config.take_over,
           "Take the run's directory from the process that owns it, although it seems to be alive",
           {.alias = "--take-over"});
  list.add("init_from", config.init_from,
           "Start from the model and weights in this directory: a Hugging Face model (config.json "
           "and safetensors, or its name if it was downloaded), a run, or a checkpoint (of PyTorch "
           "with a config.json beside it); empty: random weights",
           {.alias = "--init-from"});
  list.add("optim_from", config.optim_from,
           "With init_from: also start from the optimizer's states in this run or checkpoint; "
           "empty: fresh states",
           {.alias = "--optim-from"});
}

// How long, in what batches, with what seed.
void describe_steps(TrainConfig& train, OptionList& list, const OnlyWith& language) {
  constexpr double kMostSamples = 1e9;
  list.add("steps", train.steps, "Number of steps; set exactly one of steps, tokens and epochs",
           {.least = 0, .most = 1e15, .alias = "--steps"});
  list.add("tokens", train.tokens, "Number of tokens to train on",
           {.least = 0, .most = 1e18, .alias = "--tokens"});
  list.add("epochs", train.epochs, "Number of passes over the training data",
           {.least = 0, .most = 1e9, .alias = "--epochs"});
  list.add("batch", train.batch, "Samples per step, over all ranks",
           {.least = 1, .most = kMostSamples, .alias = "--batch"});
  list.add("micro_batch", train.micro_batch,
           "Samples per forward and backward pass on each rank; less saves memory; 0: the rank's "
           "whole part of the batch",
           {.least = 0, .most = kMostSamples});
  list.add("seed", train.seed, "Random seed of initial weights, sample order and dropout",
           {.least = 0, .alias = "--seed"});
  list.add("objective", train.objective,
           "What is learned; unless it is set, it is dpo for JSON lines with chosen and rejected "
           "answers",
           {.only_with = language});
  list.add("dpo_beta", train.dpo_beta,
           "Factor of DPO's rewards; less allows answers to move further from the base",
           {.least = 0, .above = true, .only_with = OnlyWith(train.objective, {Objective::kDpo})});
  list.add("clip", train.clip, "Maximum gradient norm; 0: no clipping", {.least = 0});
  list.add("on_nan", train.on_nan, "What to do with a step whose loss or gradient isn't finite");
  list.add("max_skips", train.max_skips, "Consecutive skipped steps before the run stops",
           {.least = 1});
  list.add("on_retries", train.on_retries,
           "What to do if a GPU is so short of memory that its allocator frees its cache in three "
           "steps in a row, which makes steps several times slower");
}

// What happens beside the steps.
void describe_rest(TrainConfig& train, OptionList& list, const OnlyWith& language) {
  list.add("eval_every", train.eval_every, "Steps between evaluations; 0: only at the end",
           {.least = 0});
  list.add("eval_batches", train.eval_batches, "Batches per evaluation; 0: all", {.least = 0});
  list.add("sample_every", train.sample_every,
           "Steps between generated samples; 0: only at the end",
           {.least = 0, .only_with = language});
  list.add("sample_tokens", train.sample_tokens, "Tokens per generated sample; 0: no samples",
           {.least = 0});
  list.add("sample_prompt", train.sample_prompt, "Prompt of generated samples");
  list.add("sample_temperature", train.sample_temperature,
           "Sampling temperature; 0: always the most likely token", {.least = 0});
  list.add("deterministic", train.deterministic,
           "Use deterministic GPU operators: the same bits every time, at some cost",
           {.alias = "--deterministic"});
  list.add("graph", train.graph,
           "Replay the whole step as one CUDA graph, recorded after the first steps");
  list.add(
      "profile", train.profile,
      "Number of steps to profile, after the first three: prints where the time went, and writes "
      "profile.html and trace.json to dir",
      {.least = 0, .most = 1e6, .alias = "--profile"});
  list.add("grace", train.grace,
           "Seconds to finish the step and save after SIGTERM or SIGINT, before all ranks are "
           "killed; 0: the larger of 30 and three recent steps",
           {.least = 0, .most = 1e6, .alias = "--grace"});
  list.add(
      "stall", train.stall,
      "Report a step, with the stacks of its threads, that takes this many times as long as nine "
      "of ten recent ones; 0: never",
      {.least = 0, .most = 1e6});
  list.add("stall_least", train.stall_least, "Seconds, at least, until a step is reported",
           {.least = 0, .most = 1e6});
}

void describe_recovery(RecoveryConfig& recovery, OptionList& list) {
  list.section("recovery", "What a run loses when ranks die");
  list.add("memory", recovery.memory,
           "Also keep checkpoints in the host's memory, from which a run goes on when ranks die");
  list.add("buddy", recovery.buddy,
           "Keep copies of a host's checkpoints in memory on the next host, so that a host may be lost");
  list.add("every", recovery.every,
           "Steps between checkpoints in memory; 0: as often as costs about 1.5 % of the time",
           {.least = 0});
}

}  // namespace

std::vector<Option> options(Config& config) {
  OptionList list;
  const OnlyWith language(config.model.type, models::kLanguageModels);
  describe_run(config, list);
  describe(config.model, list);
  describe(config.lora, list);
  describe(config.data, list, language);
  list.section("train", "Length, batches, evaluation and samples");
  describe_steps(config.train, list, language);
  describe_rest(config.train, list, language);
  describe(config.optim, list);
  describe(config.shard, list);
  describe(config.context, list);
  describe(config.fp8, list);
  describe(config.activations, list);
  describe(config.offload, list);
  describe(config.checkpoint, list);
  describe_recovery(config.recovery, list);
  describe(config.comm, list);
  describe(config.log, list);
  return std::move(list.options);
}

}  // namespace fsdp::train
