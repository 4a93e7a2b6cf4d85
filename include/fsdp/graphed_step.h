/// @file
/// A whole training step (gather, forward, backward, reduce, clip, update) as one CUDA graph.
///
///     fsdp::AdamW optimizer(sharded, {.lr = 3e-4});
///     fsdp::GraphedStep step(sharded, optimizer,
///                            [&](const auto& inputs) { return model->loss(inputs[0], inputs[1]);
///                            },
///                            {.clip = 1.0});
///     for (auto& batch : loader) {
///       fsdp::StepResult result = step({batch.data, batch.target});
///       optimizer.set_lr(schedule(++n));
///     }
///
/// On a GPU the first steps are eager. Then one step is recorded as a CUDA graph, and later steps
/// copy their inputs to where the recording reads them and replay it. Results are the same. On the
/// CPU every step is eager.
///
/// The loss function's host code runs only in eager steps and recordings. So it must not read
/// values back (item()), must use the same modules in the same mode (train() or eval()) every time,
/// and tensors that a module keeps between calls must stay where they are. Dropout works. Inputs of
/// a new shape are recorded again, and so is everything when requires_grad or the engine's settings
/// change. If a recording fails, steps stay eager and the reason is logged.
///
/// A step whose loss or gradient norm isn't finite changes no parameter and no optimizer state; the
/// device decides that. Buffers that forward writes, such as batch norm's statistics, are written.
/// The memory of a recorded step stays reserved. Every rank must take the same steps with inputs of
/// the same shapes. See docs/graphs.md.
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

/// Options of GraphedStep.
struct GraphedStepOptions {
  double clip = 0;            ///< Largest gradient norm. 0: no clipping.
  int warmup = 3;             ///< Eager steps before the first recording; at least 1.
  int64_t micro_batches = 1;  ///< Losses per step. Their gradients are averaged.
  bool graph = true;          ///< False: eager steps only.

  /// Adds the losses of micro-batches and ranks instead of averaging them, for losses that are
  /// already divided by the whole batch. Sharded::set_gradient_divide_factor() says how gradients
  /// of ranks combine.
  bool sum = false;
  /// Keeps whole gradients over the micro-batches and reduces once per step instead of after each.
  bool reduce_once = false;
  int shapes = 4;  ///< Number of input shapes whose recordings are kept.
};

/// The result of a step, on the device, valid until the next step. Reading it waits for the step.
struct StepResult {
  at::Tensor loss;     ///< float64 []: mean over micro-batches and ranks.
  at::Tensor norm;     ///< float32 []: gradient norm before clipping.
  at::Tensor skipped;  ///< bool []: loss or norm wasn't finite, and nothing was updated.
};

/// A training step that replays as a CUDA graph.
class GraphedStep {
 public:
  /// Inputs of one loss. They may be in host memory; the device reads pinned memory until the step
  /// is done.
  using Inputs = std::vector<at::Tensor>;
  /// Returns a tensor of one element.
  using Loss = std::function<at::Tensor(const Inputs&)>;

  /// Makes the optimizer capturable on a GPU. The optimizer and what `loss` uses must outlive it.
  GraphedStep(const Sharded& sharded, Optimizer& optimizer, Loss loss,
              GraphedStepOptions options = {});
  ~GraphedStep();
  GraphedStep(const GraphedStep&) = delete;
  GraphedStep& operator=(const GraphedStep&) = delete;

  /// Takes a step of one micro-batch, ordered on the current stream. Drops gradients from before.
  /// Collective. Waits for the device until at most one earlier step is still running.
  StepResult operator()(const Inputs& inputs);
  /// Takes a step of options.micro_batches micro-batches, in the same way. Collective. Waits for
  /// the device until at most one earlier step is still running.
  StepResult operator()(const std::vector<Inputs>& micro_batches);

  /// Waits until at most `under_way` steps are still running. Throws Error if a rank is lost or a
  /// step takes longer than the world's timeout. Waits for the device.
  void wait(size_t under_way = 0);

  /// Whether the last step was a replay.
  bool replayed() const;
  /// Number of recordings so far.
  int64_t recordings() const;
  /// Why steps aren't recorded any more. Empty if they are.
  const std::string& why_eager() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fsdp
