#include "train/steps.h"

#include "fsdp/error.h"
#include "train/config_check.h"

namespace fsdp::train {
namespace {

constexpr int64_t kWorthIt = 20;  // steps; for fewer, recording costs more than it saves

TrainStep::Loss loss_of(const TrainTask& task) {
  return [&task](const TrainStep::Inputs& inputs) {
    return task.loss_sum({.inputs = inputs[0],
                          .targets = inputs[1],
                          .lengths = inputs[2],
                          .count = inputs[0].size(0)});
  };
}

// Gradients are summed over ranks, and every loss is divided by the number of targets in the whole
// batch, so the gradient is that of the mean for any ranks and micro-batches.
TrainStepOptions options_of(const Training& training, bool graphed,
                            std::function<bool()> wants_to_stop) {
  const Config& config = training.config;
  const bool biases_move = config.lora.rank == 0;  // checkpoints of adapters don't hold them
  return {.clip = config.train.clip,
          .graph = graphed,
          .sum = true,
          .weighted = true,
          .weights_differ = config.data.loss_mask || config.data.packing,
          .tally = training.task.tally ? *training.task.tally : at::Tensor(),
          .use_tally = training.task.mixtures.balance(biases_move ? config.model.bias_rate : 0),
          .scaler = training.scaler.get(),
          .step_in_backward = config.offload.step_in_backward,
          .wants_to_stop = std::move(wants_to_stop)};
}

}  // namespace

Steps::Steps(const Training& training, bool graphed, std::function<bool()> wants_to_stop)
    : training_(training),
      graphed_(graphed),
      step_(training.sharded, *training.optimizer, loss_of(training.task),
            options_of(training, graphed, std::move(wants_to_stop))) {
  if (graphed_) training_.sharded.measure_exposed(false);  // not possible in a graph
}

void Steps::take(const Samples& batch, bool eager) {
  ahead_ = graphed_ && !eager;
  if (!ahead_) finish();
  std::vector<TrainStep::Inputs> parts;
  for (const Samples& part : micro_batches_of(batch, training_.config.train.micro_batch))
    parts.push_back({part.inputs, part.targets, part.lengths});
  step_.use_graphs(ahead_);
  step_(parts, static_cast<double>(batch.counted));
  if (!ahead_) finish();
}

bool wants_graphs(const Training& training, int64_t steps) {
  const Config& config = training.config;
  const bool on = config.train.graph == GraphMode::kOn;
  if (config.train.graph == GraphMode::kOff) return false;
  if (training.world.device().is_cpu()) {
    if (on)
      throw Error("train.graph = on, but this run computes on the CPU, which has no CUDA graphs.",
                  "set it to auto.");
    return false;
  }
  return on || (!training.scaler && !reads_documents_on_host(config) && !config.offload.any() &&
                !offloads(config.activations.mode) && steps >= kWorthIt);
}

}  // namespace fsdp::train
