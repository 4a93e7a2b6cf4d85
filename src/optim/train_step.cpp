// TrainStep: takes training steps and reports their outcomes.
#include "fsdp/train_step.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <thread>
#include <utility>

#include "base/format.h"
#include "base/log.h"
#include "base/rank_status.h"
#include "fsdp/communicator.h"
#include "fsdp/error.h"
#include "fsdp/grad_scaler.h"
#include "optim/require.h"
#include "optim/states.h"
#include "optim/train_step_state.h"
#include "shard/device_stream.h"
#include "shard/gradients.h"
#include "shard/update.h"

namespace fsdp {

at::Tensor optim::ready_for(at::Device device, const at::Tensor& tensor) {
  const bool pageable = !device.is_cpu() && tensor.is_cpu() && !tensor.is_pinned();
  return pageable ? tensor.pin_memory() : tensor;
}

namespace {

using std::chrono::steady_clock;
using Inputs = TrainStep::Inputs;
using optim::require;

constexpr size_t kUnderWay = 1;    // steps that may still run when the next one begins
constexpr size_t kOutcomes = 256;  // kept for outcome()
constexpr std::chrono::milliseconds kSuspicious{500};  // wait before checking the other ranks

Inputs moved(const Inputs& inputs, at::Device device) {
  Inputs there;
  for (const at::Tensor& input : inputs)
    there.push_back(input.defined() && input.device() != device
                        ? optim::ready_for(device, input).to(device, /*non_blocking=*/true)
                        : input);
  return there;
}

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

TrainStep::State::State(const Sharded& handle, Optimizer& updater, Loss function,
                        TrainStepOptions chosen)
    : sharded(handle),
      model(shard::model_of(handle)),
      optimizer(updater),
      loss(std::move(function)),
      options(std::move(chosen)),
      device(model->device()) {
  options.weights_differ = options.weights_differ && options.weighted;
  const bool offloaded = shard::offloads(*model->lock());
  decides_on_host = options.scaler || options.step_in_backward || (offloaded && !device.is_cpu());
  if (!shard::has_graphs(*model)) {
    why_eager = "there is no GPU.";
  } else if (!options.graph) {
    why_eager = "graphs are turned off (TrainStepOptions::graph).";
  } else if (options.scaler || options.step_in_backward) {
    why_eager = "its options need the host in every step (scaler, step_in_backward).";
  } else if (offloaded) {
    why_eager = "parts of the model are offloaded.";
    log::warn("steps are not recorded as a CUDA graph: " + why_eager);
  }
  if (!shard::has_streams(device)) return;
  optimizer.set_capturable(true);
  stream = c10::impl::VirtualGuardImpl(device.type())
               .getStreamFromGlobalPool(device, /*isHighPriority=*/false);
}

// --- the step, eager or recorded ---

void TrainStep::State::set_divisor(double weight) {
  if (!options.weighted) return;
  const World& world = model->world();
  if (!options.weights_differ) {
    divisor = std::max(weight * world.size(), 1.0);
    return;
  }
  // Recorded steps read it from the same place every time.
  at::Tensor sum =
      optim::ready_for(device, at::tensor({weight}, at::kDouble)).to(device, /*non_blocking=*/true);
  world.comm().all_reduce(sum, ReduceOp::SUM, {.label = "weights of the step"});
  if (!whole_weight.defined()) whole_weight = at::empty({}, sum.options());
  whole_weight.copy_(sum.squeeze(0).clamp_min(1.0));
}

at::Tensor TrainStep::State::divided(const at::Tensor& value) const {
  if (!options.weighted) return value;
  if (options.weights_differ) return value / whole_weight.to(value.scalar_type());
  return value / divisor;
}

void TrainStep::State::add_gradients(const Inputs& inputs, size_t micro_batches, bool last) {
  rank_status::set_phase("forward");
  at::Tensor value;
  {
    RECORD_USER_SCOPE("forward");
    value = loss(inputs);
  }
  if (!value.defined() || value.numel() != 1)
    throw Error("TrainStep: the loss isn't a single number.", "return the mean over the batch.");
  value = value.reshape({});
  if (!options.sum && micro_batches > 1) value = value / static_cast<double>(micro_batches);
  at::Tensor seen = value.detach().to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  if (total.defined())
    total.add_(seen);
  else
    total = seen;
  value = divided(value);
  if (options.step_in_backward && last) optimizer.step_in_backward();
  std::optional<NoSync> no_sync;
  if (options.reduce_once && !last) no_sync.emplace(sharded.no_sync());
  rank_status::set_phase("backward");
  RECORD_USER_SCOPE("backward");
  (options.scaler ? options.scaler->scale(value) : value).backward();
}

StepResult TrainStep::State::update() {
  rank_status::set_phase("optimizer");
  RECORD_USER_SCOPE("update");
  const auto engine = model->lock();
  at::NoGradGuard no_grad;
  if (options.scaler) options.scaler->unscale_(sharded);
  const double bound = options.clip > 0 ? options.clip : std::numeric_limits<double>::infinity();
  StepResult result{.norm = sharded.clip_grad_norm_(bound)};
  result.loss = std::exchange(total, at::Tensor());
  shard::reduce_loss(*engine, result.loss, /*average=*/!options.sum);
  result.loss = divided(result.loss);
  if (options.scaler) {
    result.skipped = at::zeros({}, at::TensorOptions(at::kBool).device(device));
    result.skipped.fill_(!update_by_scaler(result));
  } else {
    result.skipped = shard::skip_unless_finite(*engine, result.loss, result.norm);
    if (!decides_on_host || !result.skipped.item<bool>()) optimizer.step();
  }
  if (options.step_in_backward && result.skipped.item<bool>())
    throw Error("the loss or a gradient isn't finite, and units were updated with it in backward.",
                "resume from the last checkpoint without step_in_backward, which skips such a "
                "step.");
  optimizer.zero_grad();
  std::vector<at::Tensor> all = {result.loss, result.norm.to(at::kDouble),
                                 result.skipped.to(at::kDouble)};
  if (options.weights_differ) all.push_back(whole_weight);
  numbers = at::stack(all);
  if (!options.tally.defined()) return result;
  at::Tensor tally = options.tally.clone();
  options.tally.zero_();
  shard::reduce_loss(*engine, tally, /*average=*/false);
  if (options.use_tally) options.use_tally(tally);
  numbers = at::cat({numbers, tally});
  return result;
}

// The scaler has checked every gradient. Returns whether there was an update.
bool TrainStep::State::update_by_scaler(const StepResult& result) {
  const bool updated = std::isfinite(result.loss.item<double>()) && options.scaler->step(optimizer);
  options.scaler->update();
  return updated;
}

StepResult TrainStep::State::eager(const std::vector<Inputs>& batches) {
  replayed = false;
  total.reset();
  for (size_t i = 0; i < batches.size(); ++i)
    add_gradients(moved(batches[i], device), batches.size(), i + 1 == batches.size());
  return update();
}

StepResult TrainStep::State::take(const std::vector<Inputs>& batches, double weight) {
  if (batches.empty())
    throw Error("TrainStep: there are no micro-batches.", "pass the inputs of at least one.");
  wait(kUnderWay);
  ++steps;
  if (shard::has_gradients(*model)) optimizer.zero_grad();
  if (!why_eager.empty() || !graphs_on) {
    set_divisor(weight);
    return eager(batches);
  }
  OnOwnStream own(stream, device);
  set_divisor(weight);
  Recording* recording = find_recording(batches);
  return recording ? replay(*recording, batches) : eager(batches);
}

// --- outcomes ---

TrainStep::State::Numbers::Numbers(at::Device device, int64_t count) {
  auto host = at::TensorOptions().pinned_memory(shard::has_streams(device));
  result = at::empty({count}, host.dtype(at::kDouble));
  stop = at::zeros({1}, host.dtype(at::kInt));
}

TrainStep::State::Taken TrainStep::State::begin() {
  Taken taken{.number = steps + 1, .begun = steady_clock::now()};
  if (shard::has_streams(device) && queue.size() == known) {
    taken.start.emplace(device.type(), c10::EventFlag::BACKEND_DEFAULT);
    taken.start->record(shard::current_stream(device));
  }
  return taken;
}

void TrainStep::State::launched(Taken taken) {
  if (device.is_meta()) return;
  if (spare.empty()) spare.push_back(std::make_unique<Numbers>(device, numbers.numel()));
  taken.numbers = std::move(spare.back());
  spare.pop_back();
  Numbers& host = *taken.numbers;
  if (options.wants_to_stop) {
    const World& world = model->world();
    const int wants = options.wants_to_stop() ? 1 : 0;
    if (world.size() > 1) {
      if (!stops.defined()) stops = at::zeros({1}, at::TensorOptions(at::kInt).device(device));
      stops.fill_(wants);
      world.comm().all_reduce(stops, ReduceOp::SUM, {.label = "signals to stop"});
      host.stop.copy_(stops, /*non_blocking=*/true);
    } else {
      host.stop.fill_(wants);
    }
  }
  host.result.copy_(numbers, /*non_blocking=*/true);
  taken.outcome.weight = options.weighted ? divisor : 0;
  if (shard::has_streams(device)) {
    taken.done.emplace(device.type(), c10::EventFlag::BACKEND_DEFAULT);
    taken.done->record(shard::current_stream(device));
  }
  const bool taken_async = taken.done.has_value();
  queue.push_back(std::move(taken));
  const bool ahead = taken_async || (why_eager.empty() && graphs_on);
  wait(ahead ? kUnderWay : 0);
}

// The oldest step whose outcome isn't known has finished.
void TrainStep::State::settle_oldest() {
  Taken& taken = queue[known++];
  progress = steady_clock::now();
  const double* result = taken.numbers->result.const_data_ptr<double>();
  taken.outcome.loss = result[0];
  taken.outcome.norm = result[1];
  taken.outcome.updated = result[2] == 0;
  const int64_t own = options.weights_differ ? 4 : 3;
  if (options.weights_differ) taken.outcome.weight = result[3];
  taken.outcome.tally.assign(result + own, result + taken.numbers->result.numel());
  taken.outcome.stop = taken.numbers->stop.item<int>() > 0;
  if (taken.done) {
    const c10::Event& from = taken.start ? *taken.start : *previous;
    taken.outcome.seconds = from.elapsedTime(*taken.done) / 1e3;
    previous = std::move(taken.done);
  } else {
    taken.outcome.seconds = std::chrono::duration<double>(progress - taken.begun).count();
  }
  spare.push_back(std::move(taken.numbers));
  if (queue.size() <= kOutcomes) return;
  queue.pop_front();
  --known;
}

// Polls, because a failure that the communicators notice (a rank is gone) must end the wait.
void TrainStep::State::wait(size_t count) {
  steady_clock::time_point looked = steady_clock::now();
  while (queue.size() - known > count) {
    const Taken& oldest = queue[known];
    if (!oldest.done || oldest.done->query()) {
      settle_oldest();
      continue;
    }
    model->check_communicators();
    look(oldest, looked);
    std::this_thread::sleep_for(std::chrono::microseconds(20));  // Ends: check_communicators()
  }
}

void TrainStep::State::look(const Taken& oldest, steady_clock::time_point& looked) const {
  const auto now = steady_clock::now();
  if (now - looked < kSuspicious) return;
  looked = now;
  const std::string where =
      formatted("rank {}: step {} of TrainStep", model->world().rank(), oldest.number);
  const std::string trouble = model->world().trouble();
  if (!trouble.empty())
    throw Error(formatted("{}: {}.", where, trouble), "read the last output of that rank.");
  if (now - std::max(oldest.begun, progress) < model->world().timeout()) return;
  throw Error(formatted("{} did not end in {} s.", where, model->world().timeout().count() / 1000),
              "ranks must take the same steps with inputs of the same shapes; if a step takes that "
              "long, raise the timeout (FSDP_TIMEOUT, in seconds).");
}

// --- TrainStep ---

TrainStep::TrainStep(const Sharded& sharded, Optimizer& optimizer, Loss loss,
                     TrainStepOptions options) {
  require(options.clip >= 0, "TrainStep", "clip", options.clip, "0 or more",
          "0 turns clipping off.");
  require(options.warmup >= 1, "TrainStep", "warmup", options.warmup, "1 or more",
          "the first step allocates memory and states.");
  require(options.shapes >= 1, "TrainStep", "shapes", options.shapes, "1 or more",
          "4 is the default.");
  if (!loss) throw Error("TrainStep: the loss is empty.", "pass a function of the inputs.");
  if (options.weighted && !options.sum)
    throw Error("TrainStep: weighted losses are sums, but options.sum is false.",
                "set sum = true, and sharded.set_gradient_divide_factor(1).");
  if (options.step_in_backward && (options.clip > 0 || options.scaler))
    throw Error("TrainStep: step_in_backward with clipping or a scaler.",
                "they change gradients that an update in backward has already used.");
  if (optim::states_of(optimizer).model() != shard::model_of(sharded))
    throw Error("TrainStep: the optimizer belongs to another model.",
                "create both after the last call of fully_shard.");
  state_ = std::make_unique<State>(sharded, optimizer, std::move(loss), std::move(options));
}

TrainStep::~TrainStep() = default;

StepResult TrainStep::operator()(const Inputs& inputs, double weight) {
  return (*this)(std::vector<Inputs>{inputs}, weight);
}

StepResult TrainStep::operator()(const std::vector<Inputs>& micro_batches, double weight) {
  auto taken = state_->begin();
  StepResult result = state_->take(micro_batches, weight);
  state_->launched(std::move(taken));
  return result;
}

std::optional<StepOutcome> TrainStep::outcome() {
  State& state = *state_;
  if (state.known == 0) return std::nullopt;
  StepOutcome oldest = state.queue.front().outcome;
  state.queue.pop_front();
  --state.known;
  return oldest;
}

void TrainStep::wait(size_t under_way) {
  state_->wait(under_way);
}

void TrainStep::use_graphs(bool on) {
  state_->graphs_on = on;
}

bool TrainStep::replayed() const {
  return state_->replayed;
}
int64_t TrainStep::recordings() const {
  return state_->recordings;
}
const std::string& TrainStep::why_eager() const {
  return state_->why_eager;
}

}  // namespace fsdp
