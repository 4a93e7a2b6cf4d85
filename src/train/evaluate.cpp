#include "train/evaluate.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>

#include "fsdp/communicator.h"

namespace fsdp::train {

Evaluation evaluate(const World& world, const TrainTask& task, Feed& feed, int64_t batches,
                    int64_t micro_batch) {
  torch::NoGradGuard no_grad;
  const bool was_training = task.module->is_training();
  task.module->eval();
  at::Tensor loss = at::zeros({1}, at::TensorOptions(at::kDouble).device(world.device()));
  double counted = 0;
  for (int64_t i = 0; i < batches; ++i) {
    const Samples batch = feed.next();
    for (const Samples& part : micro_batches_of(batch, micro_batch))
      loss += task.loss_sum(on_device(part, world.device())).to(at::kDouble);
    counted += static_cast<double>(batch.counted);
  }
  task.module->train(was_training);
  at::Tensor sums = at::cat({loss, at::tensor({counted}, at::kDouble).to(world.device())});
  world.comm().all_reduce(sums, ReduceOp::SUM, {.label = "evaluation"});
  sums = sums.cpu();
  counted = sums[1].item<double>();
  Evaluation result{.counted = static_cast<int64_t>(counted)};
  result.loss = sums[0].item<double>() / std::max(counted, 1.0);
  if (!task.prefers) result.perplexity = std::exp(result.loss);
  return result;
}

}  // namespace fsdp::train
