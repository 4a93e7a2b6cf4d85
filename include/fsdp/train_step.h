/// @file
/// One training step: gradients of the micro-batches, clipping, the check for non-finite values,
/// and the update. On a GPU the whole of it can be replayed as one CUDA graph.
///
///     fsdp::AdamW optimizer(sharded, {.lr = 3e-4});
///     fsdp::TrainStep step(sharded, optimizer,
///                          [&](const auto& inputs) { return model->loss(inputs[0], inputs[1]); },
///                          {.clip = 1.0});
///     for (auto& batch : loader) {
///       step({batch.data, batch.target});
///       while (auto outcome = step.outcome()) log(outcome->loss, outcome->norm);
///       optimizer.set_lr(schedule(++n));
///     }
///
/// On a GPU the first steps are eager. Then one step is recorded as a CUDA graph, and later steps
/// copy their inputs to where the recording reads them and replay it. Results are the same. On the
/// CPU, and with options that need the host, every step is eager.
///
/// With graphs the loss function's host code runs only in eager steps and recordings. So it must
/// not read values back (item()), must use the same modules in the same mode (train() or eval())
/// every time, and tensors that a module keeps between calls must stay where they are. Dropout
/// works. Inputs of a new shape are recorded again, and so is everything when requires_grad or the
/// engine's settings change. If a recording fails, steps stay eager and the reason is logged.
///
/// A step whose loss or gradient norm isn't finite changes no parameter and no optimizer state.
/// Buffers that forward writes, such as batch norm's statistics, are written. The memory of a
/// recorded step stays reserved. Every rank must take the same steps with inputs of the same
/// shapes. See docs/graphs.md.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdp {

class GradScaler;
class Optimizer;
class Sharded;

/// Options of TrainStep.
struct TrainStepOptions {
  double clip = 0;    ///< Largest gradient norm. 0: no clipping.
  bool graph = true;  ///< Record CUDA graphs where that is possible. False: eager steps only.
  int warmup = 3;     ///< Eager steps before the first recording; at least 1.
  int shapes = 4;     ///< Number of input shapes whose recordings are kept.

  /// Adds the losses of micro-batches and ranks instead of averaging them, for losses that are
  /// already divided by the whole batch. Sharded::set_gradient_divide_factor() says how gradients
  /// of ranks combine.
  bool sum = false;
  /// Losses are sums over targets, and every step has a weight: the number of targets in this
  /// rank's batch. They are divided by the total over all ranks. Needs sum and a gradient divide
  /// factor of 1.
  bool weighted = false;
  /// Weights differ between ranks or steps (masks, packing). Ranks then add them up before each
  /// step, on the device.
  bool weights_differ = false;
  /// float64 [n] on the device: numbers about the step that the loss adds up here (counts of right
  /// answers and such). Each step adds them up over ranks, reports them in StepOutcome::tally, and
  /// sets them to zero. Undefined: none.
  at::Tensor tally = {};
  /// Called in each step after its update, with the tally of all ranks on the device. With graphs
  /// it is recorded, so it must not read values back.
  std::function<void(const at::Tensor& tally)> use_tally = {};
  /// Keeps whole gradients over the micro-batches and reduces once per step instead of after each.
  bool reduce_once = false;
  /// Scales losses, for fp16. Steps are eager.
  GradScaler* scaler = nullptr;
  /// Updates units in host memory during the last backward (Optimizer::step_in_backward). Not with
  /// clipping or a scaler. A step that isn't finite is then an Error.
  bool step_in_backward = false;
  /// Whether this rank wants to stop. Asked once per step; StepOutcome::stop tells all ranks.
  std::function<bool()> wants_to_stop = {};
};

/// The result of a step, on the device, valid until the next step. Reading it waits for the step.
struct StepResult {
  at::Tensor loss;     ///< float64 []: mean over micro-batches and ranks.
  at::Tensor norm;     ///< float32 []: gradient norm before clipping.
  at::Tensor skipped;  ///< bool []: loss or norm wasn't finite, and nothing was updated.
};

/// The result of a step on the host.
struct StepOutcome {
  double loss = 0;       ///< Mean over micro-batches and ranks, or over all targets (weighted).
  double norm = 0;       ///< Gradient norm before clipping.
  double weight = 0;     ///< Targets of all ranks (weighted).
  std::vector<double> tally = {};  ///< TrainStepOptions::tally.
  bool updated = false;  ///< False: loss or norm wasn't finite, and nothing was updated.
  bool stop = false;     ///< Some rank wanted to stop.
  double seconds = 0;    ///< How long it took. On a GPU: since the end of the step before.
};

/// Takes training steps.
class TrainStep {
 public:
  /// Inputs of one loss. They may be in host memory; the device reads pinned memory until the step
  /// is done.
  using Inputs = std::vector<at::Tensor>;
  /// Returns a tensor of one element.
  using Loss = std::function<at::Tensor(const Inputs&)>;

  /// Makes the optimizer capturable on a GPU. The optimizer, the scaler and what `loss` uses must
  /// outlive it.
  TrainStep(const Sharded& sharded, Optimizer& optimizer, Loss loss, TrainStepOptions options = {});
  ~TrainStep();
  TrainStep(const TrainStep&) = delete;
  TrainStep& operator=(const TrainStep&) = delete;

  /// Takes a step of one micro-batch, ordered on the current stream. Drops gradients from before.
  /// Collective. Waits for the device until at most one earlier step is still running.
  StepResult operator()(const Inputs& inputs, double weight = 0);
  /// Takes a step of several micro-batches, in the same way. Collective. Waits for the device until
  /// at most one earlier step is still running.
  StepResult operator()(const std::vector<Inputs>& micro_batches, double weight = 0);

  /// The outcome of the oldest step that wasn't asked for; nullopt while the device is still busy
  /// with it, and after the last. Keeps the outcomes of the last 256 steps.
  std::optional<StepOutcome> outcome();
  /// Waits until at most `under_way` steps are still running; the outcomes of the others are known.
  /// Throws Error if a rank is lost or a step takes longer than the world's timeout. Waits for the
  /// device.
  void wait(size_t under_way = 0);

  /// Turns graphs off for the next steps, or on again.
  void use_graphs(bool on);
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
