// Recording steps of a TrainStep as CUDA graphs, one per kind of input, and replaying them.
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <utility>

#include "base/format.h"
#include "base/log.h"
#include "optim/train_step_state.h"

namespace fsdp {

namespace {

using optim::InputKind;

constexpr int kRecordingsPerShape = 4;  // per shape kept; beyond it shapes change too often
constexpr size_t kShapesKnown = 64;     // with or without a recording

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

std::vector<InputKind> kinds_of(const TrainStep::Inputs& inputs) {
  std::vector<InputKind> kinds;
  for (const at::Tensor& input : inputs)
    kinds.push_back(input.defined() ? InputKind{input.sizes().vec(), input.scalar_type(), true}
                                    : InputKind{});
  return kinds;
}

std::string text(const std::vector<InputKind>& kinds) {
  std::string all;
  for (const InputKind& kind : kinds) {
    std::string sizes;
    for (int64_t size : kind.sizes) sizes += formatted("{}{}", sizes.empty() ? "" : ", ", size);
    all += formatted("{}[{}]", all.empty() ? "" : " ", sizes);
  }
  return all;
}

}  // namespace

bool TrainStep::State::record(Recording& shape, const Inputs& like) {
  forget_one_recording();
  const shard::StepGraph* sibling = nullptr;
  for (const auto& other : shapes)
    if (other->last) sibling = other->last.get();
  auto graph = [&](const std::function<void()>& work) {
    auto made = shard::make_step_graph(*model, sibling);
    made->record(work);
    sibling = made.get();
    return made;
  };
  try {
    shard::RecordsStep here(*model);
    for (const at::Tensor& input : like)
      shape.inputs.push_back(
          input.defined()
              ? at::empty_like(input, input.options().device(device).pinned_memory(false))
              : input);
    total.reset();
    const size_t count = shape.kind.micro_batches;
    auto add = [this, &shape, count] { add_gradients(shape.inputs, count, /*last=*/false); };
    if (count > 1) shape.first = graph(add);
    if (count > 2) shape.middle = graph(add);
    shape.last = graph([this, &shape, count] {
      add_gradients(shape.inputs, count, /*last=*/true);
      shape.result = update();
      shape.numbers = numbers;
    });
  } catch (const std::exception& problem) {
    total.reset();
    shapes.clear();
    why_eager = first_line(problem.what());
    log::warn("the training step can't be recorded as a CUDA graph, so steps stay eager: " +
              why_eager);
    return false;
  }
  ++recordings;
  if (recordings > 1 && model->world().rank() == 0)
    log::info(formatted("the training step was recorded again, for inputs of {}.",
                        text(shape.kind.inputs)));
  return true;
}

// Makes room for another recording.
void TrainStep::State::forget_one_recording() {
  Recording* oldest = nullptr;
  int kept = 0;
  for (const auto& shape : shapes) {
    if (!shape->last) continue;
    ++kept;
    if (!oldest || shape->last_use < oldest->last_use) oldest = shape.get();
  }
  if (kept < options.shapes) return;
  oldest->result = {};
  oldest->numbers.reset();
  oldest->first.reset();
  oldest->middle.reset();
  oldest->last.reset();
  oldest->inputs.clear();
}

// A recording keeps the settings it was made with, so it is dropped when they change. A changed
// step is eager once before it is recorded: a replay would allocate its new states every time.
void TrainStep::State::follow_changes() {
  if (stream && !optimizer.capturable()) optimizer.set_capturable(true);
  const uint64_t now = shard::state_of_recordings(*model);
  if (std::exchange(recorded_state, now) == now) return;
  const bool recorded = std::any_of(shapes.begin(), shapes.end(),
                                    [](const auto& one) { return one->last != nullptr; });
  if (recorded) wait(0);
  shapes.clear();
  before_change = recordings;
  if (recorded && model->world().rank() == 0)
    log::info(
        "the training step will be recorded again, because what it depends on has changed "
        "(requires_grad, parameters(), gradient sync, hooks, pinned units).");
}

void TrainStep::State::tell_once(bool& told, const std::string& what) const {
  if (!std::exchange(told, true) && model->world().rank() == 0) log::warn(what);
}

// Null if the micro-batches differ in shape.
TrainStep::State::Recording* TrainStep::State::known_kind(const std::vector<Inputs>& batches) {
  optim::StepKind kind{kinds_of(batches.front()), batches.size(), divisor};
  for (const Inputs& other : batches)
    if (kinds_of(other) != kind.inputs) {
      tell_once(told_uneven,
                "the micro-batches of a step have different shapes, so such steps are eager, not "
                "replayed as a CUDA graph.");
      return nullptr;
    }
  for (const auto& known : shapes)
    if (known->kind == kind) return known.get();
  if (shapes.size() >= kShapesKnown) {
    tell_once(
        told_many,
        formatted(
            "the inputs have had {} shapes: steps with rare shapes are eager, not replayed as a "
            "CUDA graph. Pad the inputs to a few lengths.",
            shapes.size()));
    std::erase_if(shapes, [](auto& known) { return !known->last; });
  }
  shapes.push_back(std::make_unique<Recording>());
  shapes.back()->kind = std::move(kind);
  return shapes.back().get();
}

StepResult TrainStep::State::replay(Recording& shape, const std::vector<Inputs>& batches) {
  shard::begin_replays(*model);
  for (size_t i = 0; i < batches.size(); ++i) {
    for (size_t j = 0; j < batches[i].size(); ++j)
      if (batches[i][j].defined())
        shape.inputs[j].copy_(optim::ready_for(device, batches[i][j]).detach(),
                              /*non_blocking=*/true);
    const bool last = i + 1 == batches.size();
    if (last) shard::before_replayed_update(*model);
    (last ? shape.last : i == 0 ? shape.first : shape.middle)->replay();
  }
  shard::end_replays(*model);
  replayed = true;
  numbers = shape.numbers;
  return shape.result;
}

TrainStep::State::Recording* TrainStep::State::find_recording(const std::vector<Inputs>& batches) {
  follow_changes();
  Recording* shape = known_kind(batches);
  if (!shape || shard::must_be_eager(*model)) return nullptr;
  shape->last_use = static_cast<uint64_t>(steps);
  if (shape->last) return shape;
  if (recordings - before_change >= int64_t{kRecordingsPerShape} * options.shapes) {
    shapes.clear();
    why_eager = "the shapes of the inputs change too often.";
    if (model->world().rank() == 0)
      log::warn(
          formatted("the training step was recorded {} times and the inputs have yet another "
                    "shape, so steps are eager from now on.",
                    recordings));
    return nullptr;
  }
  // Allocations, compilations and choices at first use must not happen during a recording.
  const int needed = recordings == 0 ? options.warmup : 1;
  if (shape->eager >= needed && record(*shape, batches.front())) return shape;
  if (why_eager.empty()) ++shape->eager;
  return nullptr;
}

}  // namespace fsdp
