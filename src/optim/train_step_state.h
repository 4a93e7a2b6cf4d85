// The state of a TrainStep. train_step.cpp takes steps and reports their outcomes;
// step_recording.cpp records them as CUDA graphs and replays them.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "fsdp/train_step.h"
#include "shard/capture.h"
#include "shard/model.h"

namespace fsdp {

namespace optim {

// What must match for a recording to be replayed.
struct InputKind {
  std::vector<int64_t> sizes;
  at::ScalarType type = at::kFloat;
  bool defined = false;
  bool operator==(const InputKind&) const = default;
};
struct StepKind {
  std::vector<InputKind> inputs;  // of each micro-batch
  size_t micro_batches = 0;
  double divisor = 1;
  bool operator==(const StepKind&) const = default;
};

// Pins pageable host memory, which can't be copied to the device asynchronously.
at::Tensor ready_for(at::Device device, const at::Tensor& tensor);

}  // namespace optim

struct TrainStep::State {
  // A recorded step: one graph for the first micro-batch, one for those in between, and one for the
  // last with the update. A step of one micro-batch has only the last.
  struct Recording {
    optim::StepKind kind;
    int eager = 0;  // eager steps so far
    uint64_t last_use = 0;
    Inputs inputs;  // the graphs read these
    std::unique_ptr<shard::StepGraph> first, middle, last;
    StepResult result;  // the graphs write this and `numbers`, in their own memory
    at::Tensor numbers;
  };
  // A step's numbers, copied asynchronously from the device.
  struct Numbers {
    Numbers(at::Device device, int64_t count);
    at::Tensor result;  // loss, norm, skipped, the weight if weights differ, the tally
    at::Tensor stop;
  };
  struct Taken {  // a step, from its launch until its outcome is asked for
    int64_t number;
    std::chrono::steady_clock::time_point begun;
    std::unique_ptr<Numbers> numbers;
    std::optional<c10::Event> start;  // of a step that found the device idle
    std::optional<c10::Event> done;
    StepOutcome outcome;
  };

  State(const Sharded& handle, Optimizer& updater, Loss function, TrainStepOptions chosen);

  Sharded sharded;
  std::shared_ptr<shard::Model> model;
  Optimizer& optimizer;
  Loss loss;
  TrainStepOptions options;
  at::Device device;
  bool decides_on_host = false;       // whether a step is skipped
  std::optional<c10::Stream> stream;  // for warm-up, recordings and replays
  std::string why_eager;
  bool graphs_on = true;
  int64_t steps = 0;
  double divisor = 1;       // of the current step's losses, if weights don't differ
  at::Tensor whole_weight;  // [] double: their divisor if weights differ
  at::Tensor total;         // the loss of the current step
  at::Tensor numbers;       // double: the current step's loss, norm, skipped (Numbers::result)

  // --- the step (train_step.cpp) ---
  StepResult take(const std::vector<Inputs>& batches, double weight);
  StepResult eager(const std::vector<Inputs>& batches);
  void set_divisor(double weight);
  at::Tensor divided(const at::Tensor& value) const;  // a loss, by the step's weight
  void add_gradients(const Inputs& inputs, size_t micro_batches, bool last);
  StepResult update();
  bool update_by_scaler(const StepResult& result);

  // --- outcomes (train_step.cpp) ---
  Taken begin();
  void launched(Taken taken);
  void settle_oldest();
  void wait(size_t count);
  void look(const Taken& oldest, std::chrono::steady_clock::time_point& looked) const;
  std::deque<Taken> queue;  // in order; the outcomes of the first `known` are known
  size_t known = 0;
  std::vector<std::unique_ptr<Numbers>> spare;
  std::optional<c10::Event> previous;  // the end of the last step whose outcome is known
  at::Tensor stops;                    // [1] int32: ranks that want to stop
  std::chrono::steady_clock::time_point progress{};  // when the last step was seen to finish

  // --- recordings (step_recording.cpp) ---
  // Null: the step must be eager.
  Recording* find_recording(const std::vector<Inputs>& batches);
  StepResult replay(Recording& recording, const std::vector<Inputs>& batches);
  bool record(Recording& recording, const Inputs& like);
  Recording* known_kind(const std::vector<Inputs>& batches);
  void follow_changes();
  void forget_one_recording();
  void tell_once(bool& told, const std::string& what) const;
  std::vector<std::unique_ptr<Recording>> shapes;
  int64_t recordings = 0, before_change = 0;
  uint64_t recorded_state = 0;  // state_of_recordings
  bool replayed = false, told_uneven = false, told_many = false;
};

}  // namespace fsdp
