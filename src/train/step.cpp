#include "train/step.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/rank_status.h"
#include "fsdp/communicator.h"
#include "fsdp/error.h"

namespace fsdp::train {
namespace {

// Sums a few numbers over all ranks, with a single wait for those on the device.
std::vector<double> summed(const World& world, const std::vector<at::Tensor>& on_device,
                           const std::vector<double>& on_host, const char* what) {
  at::Tensor numbers = at::tensor(on_host, at::kDouble).to(world.device());
  std::vector<at::Tensor> parts;
  for (const at::Tensor& part : on_device) parts.push_back(part.to(at::kDouble).reshape({1}));
  parts.push_back(numbers);
  at::Tensor all = at::cat(parts);
  world.comm().all_reduce(all, ReduceOp::SUM, {.label = what});
  at::Tensor here = all.cpu();
  const double* values = here.const_data_ptr<double>();
  return {values, values + here.numel()};
}

int64_t micro_of(int64_t wanted, const Samples& batch) {
  return wanted > 0 ? std::min(wanted, batch.count) : batch.count;
}

}  // namespace

StepOutcome take_step(const World& world, const Trainee& trainee, const Sharded& sharded,
                      Optimizer& optimizer, GradScaler* scaler, const Samples& batch,
                      const StepOptions& options, const std::function<bool()>& wants_to_stop) {
  // Gradients are summed over ranks, and every loss is divided by the number of targets in the whole
  // batch, so the gradient is that of the mean for any ranks and micro-batches.
  double counted = static_cast<double>(batch.counted) * world.size();
  if (options.masked) counted = summed(world, {}, {double(batch.counted)}, "targets").front();
  double divisor = std::max(counted, 1.0);

  int64_t micro = micro_of(options.micro_batch, batch);
  at::Tensor loss = at::zeros({1}, at::TensorOptions(at::kDouble).device(world.device()));
  for (int64_t first = 0; first < batch.count; first += micro) {
    Samples part =
        on_device(part_of(batch, first, std::min(micro, batch.count - first)), world.device());
    rank_status::set_phase("forward");
    at::Tensor sum = trainee.loss_sum(part);
    loss += sum.detach().to(at::kDouble);
    at::Tensor mean = sum / divisor;
    if (options.step_in_backward && first + micro >= batch.count) optimizer.step_in_backward();
    rank_status::set_phase("backward");
    (scaler ? scaler->scale(mean) : mean).backward();
  }
  rank_status::set_phase("optimizer");
  if (scaler) scaler->unscale_(sharded);
  double bound = options.clip > 0 ? options.clip : std::numeric_limits<double>::infinity();
  at::Tensor norm = sharded.clip_grad_norm_(bound);

  // The norm is the same on every rank, so each adds its share.
  std::vector<double> sums = summed(world, {loss, norm.to(at::kDouble) / world.size()},
                                    {wants_to_stop() ? 1.0 : 0.0}, "loss of the step");
  StepOutcome outcome{.loss = sums[0] / divisor,
                      .grad_norm = sums[1],
                      .counted = static_cast<int64_t>(counted),
                      .stop = sums[2] > 0};
  if (scaler) {  // it checked every gradient
    outcome.updated = std::isfinite(outcome.loss) && scaler->step(optimizer);
    scaler->update();
  } else if (std::isfinite(outcome.loss) && std::isfinite(outcome.grad_norm)) {
    optimizer.step();
    outcome.updated = true;
  }
  if (options.step_in_backward && !outcome.updated)
    throw Error("the loss or a gradient isn't finite, and units were updated with it in backward.",
                "resume from the last checkpoint with offload.step_in_backward = false, which skips "
                "such a step.");
  optimizer.zero_grad();
  return outcome;
}

Evaluation evaluate(const World& world, const Trainee& trainee, Feed& feed, int64_t batches,
                    int64_t micro_batch) {
  torch::NoGradGuard no_grad;
  bool was_training = trainee.module->is_training();
  trainee.module->eval();
  at::Tensor loss = at::zeros({1}, at::TensorOptions(at::kDouble).device(world.device()));
  int64_t counted = 0;
  for (int64_t i = 0; i < batches; ++i) {
    Samples batch = feed.next();
    int64_t micro = micro_of(micro_batch, batch);
    for (int64_t first = 0; first < batch.count; first += micro) {
      Samples part = part_of(batch, first, std::min(micro, batch.count - first));
      loss += trainee.loss_sum(on_device(part, world.device())).to(at::kDouble);
    }
    counted += batch.counted;
  }
  trainee.module->train(was_training);
  std::vector<double> sums = summed(world, {loss}, {double(counted)}, "evaluation");
  Evaluation result{.counted = static_cast<int64_t>(sums[1])};
  result.loss = sums[0] / std::max(sums[1], 1.0);
  result.perplexity = std::exp(result.loss);
  return result;
}

}  // namespace fsdp::train
