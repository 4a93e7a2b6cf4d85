// The training step: micro-batches, clipping and the update, of a sharded model (eager, or as a
// CUDA graph) or of the same model without FSDP.
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "bench/training.h"
#include "observe/trace.h"

namespace fsdp::bench {
namespace {

const AdamWOptions kAdamW = {.lr = 1e-4, .betas = {0.9, 0.95}, .weight_decay = 0.1};  // the peer's

}  // namespace

// torch.optim.AdamW(fused=True) and torch.nn.utils.clip_grad_norm_, over whole parameters. This is
// as fast as plain C++ on LibTorch gets.
class PlainAdamW {
 public:
  // In bfloat16, the model gets float32 masters.
  PlainAdamW(torch::nn::Module& model, bool bf16) {
    for (const at::Tensor& parameter : model.parameters()) {
      const bool tied = std::any_of(parameters_.begin(), parameters_.end(),
                                    [&](const auto& other) { return other.is_same(parameter); });
      if (tied) continue;
      parameters_.push_back(parameter);
      masters_.push_back(bf16 ? parameter.detach().clone() : parameter);
      averages_.push_back(at::zeros_like(masters_.back()));
      squares_.push_back(at::zeros_like(masters_.back()));
      steps_.push_back(at::zeros({}, parameter.options().dtype(at::kFloat)));
    }
    if (bf16) model.to(at::kBFloat16);
  }

  void clip(double max_norm) {
    torch::NoGradGuard no_grad;
    const std::vector<at::Tensor> gradients = all_gradients();
    const at::Tensor total = at::linalg_vector_norm(at::stack(at::_foreach_norm(gradients)));
    at::_foreach_mul_(gradients, (max_norm / (total + 1e-6)).clamp_max(1.0));
  }

  void step() {
    torch::NoGradGuard no_grad;
    std::vector<at::Tensor> gradients = all_gradients();
    for (at::Tensor& gradient : gradients)
      gradient = gradient.to(at::kFloat);  // no copy if it already is
    at::_foreach_add_(steps_, 1);
    at::_fused_adamw_(masters_, gradients, averages_, squares_, {}, steps_, kAdamW.lr,
                      kAdamW.betas.first, kAdamW.betas.second, kAdamW.weight_decay, kAdamW.eps,
                      /*amsgrad=*/false, /*maximize=*/false);
    if (!masters_.front().is_same(parameters_.front())) at::_foreach_copy_(parameters_, masters_);
    for (at::Tensor& parameter : parameters_) parameter.mutable_grad() = at::Tensor();
  }

 private:
  std::vector<at::Tensor> all_gradients() const {
    std::vector<at::Tensor> all;
    for (const at::Tensor& parameter : parameters_) all.push_back(parameter.grad());
    return all;
  }

  std::vector<at::Tensor> parameters_, masters_, averages_, squares_, steps_;
};

Training make_training(const Row& row, const World& world) {
  Training training{
      .work = make_workload(row, world), .device = world.device(), .settled = row.warmup};
  Workload& work = training.work;
  if (row.mode == "plain") {
    const bool bf16 = row.dtype == "bf16";
    place_workload(work, world.device());
    training.plain = std::make_shared<PlainAdamW>(*work.trainee.module, bf16);
    for (at::Tensor& input : work.inputs)
      if (bf16 && input.is_floating_point()) input = input.to(at::kBFloat16);
    return training;
  }
  training.sharded = shard_workload(work, row, world);
  if (row.mode == "tape") return training;
  training.optimizer = std::make_shared<AdamW>(training.sharded, kAdamW);
  if (row.mode == "graph") {
    training.settled = std::max(1, row.warmup - 2);  // one captures and one replays before timing
    training.graph =
        std::make_shared<TrainStep>(training.sharded, *training.optimizer, work.loss,
                                    TrainStepOptions{.clip = row.clip, .warmup = training.settled});
  }
  if (offload_mode(row)) {
    training.settled = 0;
    for (at::Tensor& input : work.inputs) input = input.cpu();  // as a data loader provides it
  }
  return training;
}

at::Tensor take_step(const Training& training, const Row& row,
                     const std::function<void(Stage)>& passed) {
  const Workload& work = training.work;
  if (training.graph)
    return (*training.graph)(std::vector(static_cast<size_t>(row.accumulate), work.inputs)).loss;
  Inputs inputs = work.inputs;
  if (offload_mode(row)) {
    RECORD_USER_SCOPE(observe::kLoadingScope);
    for (at::Tensor& input : inputs) input = input.to(training.device);
  }
  at::Tensor loss;
  for (int64_t i = 1; i <= row.accumulate; ++i) {
    const bool last = i == row.accumulate;
    if (training.optimizer && row.on.ranks > 1 && !offload_mode(row))
      training.sharded.set_requires_gradient_sync(last);
    if (training.optimizer && last && row.clip <= 0) training.optimizer->step_in_backward();
    loss = work.loss(inputs);
    passed(Stage::kForward);
    (row.accumulate > 1 ? loss / static_cast<double>(row.accumulate) : loss).backward();
    passed(Stage::kBackward);
  }
  if (row.clip > 0 && training.plain) training.plain->clip(row.clip);
  if (row.clip > 0 && !training.plain) training.sharded.clip_grad_norm_(row.clip);
  passed(Stage::kClip);
  if (training.plain) training.plain->step();
  if (training.optimizer) training.optimizer->step();
  if (!training.plain) training.sharded.zero_grad();
  passed(Stage::kUpdate);
  return loss.detach();
}

}  // namespace fsdp::bench
