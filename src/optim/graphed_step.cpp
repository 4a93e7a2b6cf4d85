// GraphedStep: takes training steps eagerly, then records one per input shape as a CUDA graph and
// replays it.
#include "fsdp/graphed_step.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <limits>
#include <optional>
#include <thread>

#include "base/log.h"
#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "optim/require.h"
#include "shard/capture.h"
#include "shard/device_stream.h"
#include "shard/gradients.h"
#include "shard/model.h"
#include "shard/update.h"

namespace fsdp {
namespace {

using std::chrono::steady_clock;
using Inputs = GraphedStep::Inputs;
using optim::require;

constexpr size_t kUnderWay = 1;         // steps that may still run when the next one begins
constexpr int kRecordingsPerShape = 4;  // per shape kept; beyond it shapes change too often
constexpr size_t kShapesKnown = 64;     // with or without a recording
constexpr std::chrono::milliseconds kSuspicious{500};  // wait before checking the other ranks

// What must match for a recording to be replayed.
struct InputKind {
  std::vector<int64_t> sizes;
  at::ScalarType type = at::kFloat;
  bool defined = false;
  bool operator==(const InputKind&) const = default;
};

std::vector<InputKind> kinds_of(const Inputs& inputs) {
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
    for (int64_t size : kind.sizes) sizes += (sizes.empty() ? "" : ", ") + std::to_string(size);
    all += (all.empty() ? "[" : " [") + sizes + "]";
  }
  return all;
}

// Pins pageable host memory, which can't be copied to the device asynchronously.
at::Tensor ready_for(at::Device device, const at::Tensor& tensor) {
  const bool pageable = !device.is_cpu() && tensor.is_cpu() && !tensor.is_pinned();
  return pageable ? tensor.pin_memory() : tensor;
}

Inputs moved(const Inputs& inputs, at::Device device) {
  Inputs there;
  for (const at::Tensor& input : inputs)
    there.push_back(input.defined() && input.device() != device
                        ? ready_for(device, input).to(device, /*non_blocking=*/true)
                        : input);
  return there;
}

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

}  // namespace

struct GraphedStep::State {
  // A recorded step: one graph for the first micro-batch, one for those in between, and one for the
  // last with the update. A step of one micro-batch has only the last.
  struct Shape {
    std::vector<InputKind> kinds;
    int eager = 0;  // eager steps so far
    uint64_t last_use = 0;
    Inputs inputs;  // the graphs read these
    std::unique_ptr<shard::StepGraph> first, middle, last;
    StepResult result;  // the graphs write this, in their own memory
  };
  struct UnderWay {
    c10::Event done;
    int64_t step;
    steady_clock::time_point begun;
  };

  State(const Sharded& handle, Optimizer& updater, Loss function, GraphedStepOptions chosen)
      : sharded(handle),
        model(shard::model_of(handle)),
        optimizer(updater),
        loss(std::move(function)),
        options(chosen),
        device(model->device()) {}

  Sharded sharded;
  std::shared_ptr<shard::Model> model;
  Optimizer& optimizer;
  Loss loss;
  GraphedStepOptions options;
  at::Device device;
  std::optional<c10::Stream> stream;  // for warm-up, recordings and replays
  std::string why_eager;
  std::vector<std::unique_ptr<Shape>> shapes;
  at::Tensor total;  // the loss of the current step
  std::deque<UnderWay> under_way;
  steady_clock::time_point progress{};  // when the last step was seen to finish
  int64_t steps = 0, recordings = 0, before_change = 0;
  uint64_t known = 0;  // state_of_recordings
  bool replayed = false;
  bool told_uneven = false, told_many = false;

  StepResult take(const std::vector<Inputs>& batches);
  StepResult eager(const std::vector<Inputs>& batches);
  StepResult replay(Shape& shape, const std::vector<Inputs>& batches);
  bool record(Shape& shape, const Inputs& like);
  Shape* shape_of(const std::vector<Inputs>& batches);
  void follow_changes();
  void tell_once(bool& told, const std::string& what) const;
  void forget_one_recording();
  void add_gradients(const Inputs& inputs, bool last);
  StepResult update();
  void wait(size_t count);
  void look(const UnderWay& oldest, steady_clock::time_point& looked) const;
};

namespace {

// While alive, the step's own stream is the current one. It first waits for the caller's stream,
// which waits for it at the end.
class OnOwnStream {
 public:
  OnOwnStream(const std::optional<c10::Stream>& stream, at::Device device) : device_(device) {
    shard::StreamEvent begin;
    begin.record(device_);
    if (stream) guard_.emplace(*stream);
    begin.wait(device_);
  }
  ~OnOwnStream() {
    try {
      shard::StreamEvent end;
      end.record(device_);
      guard_.reset();
      end.wait(device_);
    } catch (const std::exception&) {  // the device is lost; the next call reports it
    }
  }
  OnOwnStream(const OnOwnStream&) = delete;
  OnOwnStream& operator=(const OnOwnStream&) = delete;

 private:
  at::Device device_;
  std::optional<c10::StreamGuard> guard_;
};

}  // namespace

// --- the step itself, eager or recorded ---

void GraphedStep::State::add_gradients(const Inputs& inputs, bool last) {
  at::Tensor value = loss(inputs);
  if (!value.defined() || value.numel() != 1)
    throw Error("GraphedStep: the loss isn't a single number.", "return the mean over the batch.");
  value = value.reshape({});
  if (!options.sum && options.micro_batches > 1)
    value = value / static_cast<double>(options.micro_batches);
  at::Tensor seen = value.detach().to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  if (total.defined())
    total.add_(seen);
  else
    total = seen;
  std::optional<NoSync> no_sync;
  if (options.reduce_once && !last) no_sync.emplace(sharded.no_sync());
  value.backward();
}

StepResult GraphedStep::State::update() {
  const auto engine = model->lock();
  at::NoGradGuard no_grad;
  const double bound = options.clip > 0 ? options.clip : std::numeric_limits<double>::infinity();
  StepResult result{.norm = sharded.clip_grad_norm_(bound)};
  result.loss = std::exchange(total, at::Tensor());
  shard::reduce_loss(*engine, result.loss, /*average=*/!options.sum);
  result.skipped = shard::skip_unless_finite(*engine, result.loss, result.norm);
  optimizer.step();
  optimizer.zero_grad();
  return result;
}

StepResult GraphedStep::State::eager(const std::vector<Inputs>& batches) {
  replayed = false;
  total.reset();
  for (size_t i = 0; i < batches.size(); ++i)
    add_gradients(moved(batches[i], device), i + 1 == batches.size());
  return update();
}

// --- recordings ---

bool GraphedStep::State::record(Shape& shape, const Inputs& like) {
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
    auto add = [&] { add_gradients(shape.inputs, /*last=*/false); };
    if (options.micro_batches > 1) shape.first = graph(add);
    if (options.micro_batches > 2) shape.middle = graph(add);
    shape.last = graph([&] {
      add_gradients(shape.inputs, /*last=*/true);
      shape.result = update();
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
    log::info("the training step was recorded again, for inputs of " + text(shape.kinds) + ".");
  return true;
}

// Makes room for another recording.
void GraphedStep::State::forget_one_recording() {
  Shape* oldest = nullptr;
  int kept = 0;
  for (const auto& shape : shapes) {
    if (!shape->last) continue;
    ++kept;
    if (!oldest || shape->last_use < oldest->last_use) oldest = shape.get();
  }
  if (kept < options.shapes) return;
  oldest->result = {};
  oldest->first.reset();
  oldest->middle.reset();
  oldest->last.reset();
  oldest->inputs.clear();
}

// A recording keeps the settings it was made with, so it is dropped when they change. A changed
// step is eager once before it is recorded: a replay would allocate its new states every time.
void GraphedStep::State::follow_changes() {
  if (stream && !optimizer.capturable()) optimizer.set_capturable(true);
  const uint64_t now = shard::state_of_recordings(*model);
  if (std::exchange(known, now) == now) return;
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

void GraphedStep::State::tell_once(bool& told, const std::string& what) const {
  if (!std::exchange(told, true) && model->world().rank() == 0) log::warn(what);
}

// Null if the micro-batches differ in shape.
GraphedStep::State::Shape* GraphedStep::State::shape_of(const std::vector<Inputs>& batches) {
  std::vector<InputKind> kinds = kinds_of(batches.front());
  for (const Inputs& other : batches)
    if (kinds_of(other) != kinds) {
      tell_once(told_uneven,
                "the micro-batches of a step have different shapes, so such steps are eager, not "
                "replayed as a CUDA graph.");
      return nullptr;
    }
  for (const auto& known : shapes)
    if (known->kinds == kinds) return known.get();
  if (shapes.size() >= kShapesKnown) {
    tell_once(
        told_many,
        "the inputs have had " + std::to_string(shapes.size()) +
            " shapes: steps with rare shapes are eager, not replayed as a CUDA graph. Pad the "
            "inputs to a few lengths.");
    std::erase_if(shapes, [](auto& known) { return !known->last; });
  }
  shapes.push_back(std::make_unique<Shape>());
  shapes.back()->kinds = std::move(kinds);
  return shapes.back().get();
}

StepResult GraphedStep::State::replay(Shape& shape, const std::vector<Inputs>& batches) {
  shard::begin_replays(*model);
  for (size_t i = 0; i < batches.size(); ++i) {
    for (size_t j = 0; j < batches[i].size(); ++j)
      if (batches[i][j].defined())
        shape.inputs[j].copy_(ready_for(device, batches[i][j]).detach(), /*non_blocking=*/true);
    bool last = i + 1 == batches.size();
    (last ? shape.last : i == 0 ? shape.first : shape.middle)->replay();
  }
  shard::end_replays(*model);
  replayed = true;
  return shape.result;
}

StepResult GraphedStep::State::take(const std::vector<Inputs>& batches) {
  if (static_cast<int64_t>(batches.size()) != options.micro_batches)
    throw Error(fmt::format("GraphedStep: got {} micro-batches, but options.micro_batches is {}.",
                            batches.size(), options.micro_batches),
                "pass a vector with the inputs of each micro-batch.");
  wait(kUnderWay);
  ++steps;
  if (shard::has_gradients(*model)) optimizer.zero_grad();
  if (!why_eager.empty()) return eager(batches);
  OnOwnStream own(stream, device);
  follow_changes();
  Shape* shape = shape_of(batches);
  if (!shape || shard::must_be_eager(*model)) return eager(batches);
  shape->last_use = steps;
  if (shape->last) return replay(*shape, batches);
  if (recordings - before_change >= int64_t{kRecordingsPerShape} * options.shapes) {
    shapes.clear();
    why_eager = "the shapes of the inputs change too often.";
    if (model->world().rank() == 0)
      log::warn("the training step was recorded " + std::to_string(recordings) +
                " times and the inputs have yet another shape, so steps are eager from now on.");
    return eager(batches);
  }
  // Allocations, compilations and choices at first use must not happen during a recording.
  const int needed = recordings == 0 ? options.warmup : 1;
  if (shape->eager >= needed && record(*shape, batches.front())) return replay(*shape, batches);
  if (why_eager.empty()) ++shape->eager;
  return eager(batches);
}

// --- waiting ---

// Polls, because a failure that the communicators notice (a rank is gone) must end the wait.
void GraphedStep::State::wait(size_t count) {
  steady_clock::time_point looked = steady_clock::now();
  while (under_way.size() > count) {
    if (under_way.front().done.query()) {
      under_way.pop_front();
      progress = steady_clock::now();
      continue;
    }
    model->check_communicators();
    look(under_way.front(), looked);
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

void GraphedStep::State::look(const UnderWay& oldest, steady_clock::time_point& looked) const {
  const auto now = steady_clock::now();
  if (now - looked < kSuspicious) return;
  looked = now;
  const std::string where =
      fmt::format("rank {}: step {} of GraphedStep", model->world().rank(), oldest.step);
  const std::string trouble = model->world().trouble();
  if (!trouble.empty())
    throw Error(where + ": " + trouble + ".", "read the last output of that rank.");
  if (now - std::max(oldest.begun, progress) < model->world().timeout()) return;
  throw Error(
      fmt::format("{} did not end in {} s.", where, model->world().timeout().count() / 1000),
      "ranks must take the same steps with inputs of the same shapes; if a step takes that "
      "long, raise the timeout (FSDP_TIMEOUT, in seconds).");
}

// --- GraphedStep ---

GraphedStep::GraphedStep(const Sharded& sharded, Optimizer& optimizer, Loss loss,
                         GraphedStepOptions options) {
  require(options.clip >= 0, "GraphedStep", "clip", options.clip, "0 or more",
          "0 turns clipping off.");
  require(options.micro_batches >= 1, "GraphedStep", "micro_batches", options.micro_batches,
          "1 or more", "1 takes the whole batch at once.");
  require(options.warmup >= 1, "GraphedStep", "warmup", options.warmup, "1 or more",
          "the first step allocates memory and states.");
  require(options.shapes >= 1, "GraphedStep", "shapes", options.shapes, "1 or more",
          "4 is the default.");
  if (!loss) throw Error("GraphedStep: the loss is empty.", "pass a function of the inputs.");
  state_ = std::make_unique<State>(sharded, optimizer, std::move(loss), options);
  if (optimizer.model() != state_->model)
    throw Error("GraphedStep: the optimizer belongs to another model.",
                "create both after the last call of fully_shard.");
  if (!shard::has_graphs(*state_->model))
    state_->why_eager = "there is no GPU.";
  else if (!options.graph)
    state_->why_eager = "graphs are turned off (GraphedStepOptions::graph).";
  else if (shard::offloads(*state_->model->lock())) {
    state_->why_eager = "parts of the model are offloaded.";
    log::warn("steps are not recorded as a CUDA graph: " + state_->why_eager);
  }
  if (!shard::has_streams(state_->device)) return;
  optimizer.set_capturable(true);
  state_->stream = c10::impl::VirtualGuardImpl(state_->device.type())
                       .getStreamFromGlobalPool(state_->device, /*isHighPriority=*/false);
}

GraphedStep::~GraphedStep() = default;

StepResult GraphedStep::operator()(const Inputs& inputs) {
  return (*this)(std::vector<Inputs>{inputs});
}

StepResult GraphedStep::operator()(const std::vector<Inputs>& micro_batches) {
  State& state = *state_;
  StepResult result = state.take(micro_batches);
  if (shard::has_streams(state.device)) {
    c10::Event done(state.device.type());
    done.record(shard::current_stream(state.device));
    state.under_way.push_back({std::move(done), state.steps, steady_clock::now()});
  }
  return result;
}

void GraphedStep::wait(size_t under_way) {
  state_->wait(under_way);
}

bool GraphedStep::replayed() const {
  return state_->replayed;
}
int64_t GraphedStep::recordings() const {
  return state_->recordings;
}
const std::string& GraphedStep::why_eager() const {
  return state_->why_eager;
}

}  // namespace fsdp
