// GraphedStep: a whole training step (gather, forward, backward, reduce, clip, update) as one
// launch.
//
//   fsdp::AdamW optimizer(sharded, {.lr = 3e-4});
//   fsdp::GraphedStep step(sharded, optimizer,
//                          [&](const auto& inputs) { return model->loss(inputs[0], inputs[1]); },
//                          {.clip = 1.0});
//   for (auto& batch : loader) {
//     fsdp::StepResult result = step({batch.data, batch.target});
//     optimizer.set_lr(schedule(++n));
//   }
//
// On a GPU the first steps are eager; then a step is recorded as a CUDA graph and replayed from
// then on, with the inputs copied to where the recording read them. The numbers are the same. What
// the loss does on the host happens at recordings only, so it must not depend on the step: no
// values read back (item()), the same modules every time, module->train() or eval() as it was; and
// what a module keeps for itself between calls must stay where it is. Dropout works. Inputs of
// other shapes are recorded again, and so is everything when requires_grad or the engine's settings
// change. Where a recording fails, steps stay eager, and a line says why. On the CPU every step is
// eager.
//
// A step whose loss or gradient is not finite changes no parameter and no state of the optimizer;
// that is decided on the device. What forward writes (the statistics of a batch norm) is written.
// Memory that a recorded step needs stays reserved. Every rank takes the same steps, with inputs of
// the same shapes. docs/graphs.md says more.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fsdp {

class Optimizer;
class Sharded;

struct GraphedStepOptions {
  double clip = 0;            // largest norm of the gradient; 0: none
  int warmup = 3;             // eager steps before the first recording, at least 1
  int64_t micro_batches = 1;  // losses of a step, whose gradients are averaged
  bool graph = true;          // false: eager steps only
  // Losses of micro-batches and ranks are added up instead: each is divided by the whole batch
  // already. (Gradients of ranks are as set_gradient_divide_factor says.)
  bool sum = false;
  // Whole gradients are kept over the micro-batches and reduced once a step, instead of after each.
  bool reduce_once = false;
  int shapes = 4;  // recordings that are kept, for inputs of as many shapes
};

// On the device, valid until the next step. Reading them waits for the step.
struct StepResult {
  at::Tensor loss;     // float64 []: the mean over micro-batches and ranks
  at::Tensor norm;     // float32 []: of the gradient, before the clip
  at::Tensor skipped;  // bool []: loss or norm was not finite, and nothing was updated
};

class GraphedStep {
 public:
  // Of one loss. May lie in host memory; if that is pinned, it is read until the step is done.
  using Inputs = std::vector<at::Tensor>;
  using Loss = std::function<at::Tensor(const Inputs&)>;  // a tensor of one element

  // On a GPU the optimizer is made capturable. It and what `loss` uses must outlive the step.
  GraphedStep(const Sharded& sharded, Optimizer& optimizer, Loss loss,
              GraphedStepOptions options = {});
  ~GraphedStep();
  GraphedStep(const GraphedStep&) = delete;
  GraphedStep& operator=(const GraphedStep&) = delete;

  // Takes a step, ordered on the current stream like any other work. At most two are under way on
  // the device when it returns. Collective. Gradients that were there before are dropped.
  StepResult operator()(const Inputs& inputs);                      // one micro-batch
  StepResult operator()(const std::vector<Inputs>& micro_batches);  // as many as the options say

  // Waits until at most `under_way` steps are not done. An Error where a rank is lost or a step
  // takes longer than the world's timeout.
  void wait(size_t under_way = 0);

  bool replayed() const;       // whether the last step was
  int64_t recordings() const;  // made so far
  // Why no step is recorded any more. Empty: they are, once their shape has come before.
  const std::string& why_eager() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fsdp
