#include "train/steps.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>

#include "fsdp/communicator.h"
#include "fsdp/error.h"
#include "fsdp/graphed_step.h"

namespace fsdp::train {
namespace {

constexpr int64_t kWorthIt = 20;  // steps; for fewer, recording costs more than it saves
constexpr size_t kAhead = 1;      // launched steps whose outcome isn't waited for

// A step's numbers, copied asynchronously from the device.
struct Arrival {
  explicit Arrival(at::Device device) {
    auto host = at::TensorOptions().pinned_memory(!device.is_cpu());
    loss = at::empty({}, host.dtype(at::kDouble));
    norm = at::empty({}, host.dtype(at::kFloat));
    skipped = at::empty({}, host.dtype(at::kBool));
    stop = at::zeros({1}, host.dtype(at::kInt));
  }
  at::Tensor loss, norm, skipped, stop;
  std::optional<c10::Event> complete;
};

}  // namespace

struct Steps::Graphed {
  Graphed(const Training& training, const StepOptions& options, const Samples& like)
      : counted(like.counted),
        rows(options.micro_batch > 0 ? std::min(options.micro_batch, like.count) : like.count),
        device(training.world.device()),
        arrivals{Arrival(device), Arrival(device)},
        stop(at::zeros({1}, at::TensorOptions(at::kInt).device(device))),
        step(training.sharded, *training.optimizer, loss(training), step_options(options, like)) {}

  GraphedStep::Loss loss(const Training& training) const {
    const double all = static_cast<double>(std::max<int64_t>(counted, 1) * training.world.size());
    return [&trainee = training.trainee, all](const GraphedStep::Inputs& inputs) {
      Samples part{.inputs = inputs[0], .targets = inputs[1], .count = inputs[0].size(0)};
      return trainee.loss_sum(part) / all;
    };
  }
  GraphedStepOptions step_options(const StepOptions& options, const Samples& like) const {
    return {.clip = options.clip, .micro_batches = like.count / rows, .sum = true};
  }

  int64_t counted;  // targets of a rank's batch
  int64_t rows;     // of a micro-batch
  at::Device device;
  std::array<Arrival, kAhead + 1> arrivals;
  at::Tensor stop;  // [1] int32: ranks that want to stop
  GraphedStep step;
  size_t begun = 0, collected = 0;
};

Steps::Steps(const Training& training, const StepOptions& options, bool graphed,
             std::function<bool()> wants_to_stop)
    : training_(training),
      options_(options),
      graphed_(graphed),
      wants_to_stop_(std::move(wants_to_stop)) {}

Steps::~Steps() = default;

void Steps::take(const Samples& batch, bool eager) {
  ahead_ = graphed_ && !eager;
  if (ahead_) return take_graphed(batch);
  finish();
  known_.push_back(take_step(training_.world, training_.trainee, training_.sharded,
                             *training_.optimizer, training_.scaler.get(), batch, options_,
                             wants_to_stop_));
  known_.back().known = std::chrono::steady_clock::now();
}

void Steps::take_graphed(const Samples& batch) {
  if (!steps_) {
    training_.sharded.measure_exposed(false);  // not possible in a graph
    steps_ = std::make_unique<Graphed>(training_, options_, batch);
  }
  Graphed& graphed = *steps_;
  if (batch.counted != graphed.counted || batch.count % graphed.rows != 0)
    throw Error("a batch has " + std::to_string(batch.counted) +
                    " targets that count, but the CUDA graph was recorded for " +
                    std::to_string(graphed.counted) + ".",
                "set --train.graph off.");
  std::vector<GraphedStep::Inputs> parts;
  for (int64_t first = 0; first < batch.count; first += graphed.rows) {
    Samples part = part_of(batch, first, graphed.rows);
    parts.push_back({part.inputs, part.targets});
  }
  StepResult result = graphed.step(parts);

  Arrival& arrival = graphed.arrivals[graphed.begun % graphed.arrivals.size()];
  ++graphed.begun;
  const World& world = training_.world;
  const int wants = wants_to_stop_() ? 1 : 0;
  if (world.size() > 1) {
    graphed.stop.fill_(wants);
    world.comm().all_reduce(graphed.stop, ReduceOp::SUM, {.label = "signals to stop"});
    arrival.stop.copy_(graphed.stop, /*non_blocking=*/true);
  } else {
    arrival.stop.fill_(wants);
  }
  arrival.loss.copy_(result.loss, /*non_blocking=*/true);
  arrival.norm.copy_(result.norm, /*non_blocking=*/true);
  arrival.skipped.copy_(result.skipped, /*non_blocking=*/true);
  if (!graphed.device.is_cpu()) {
    if (!arrival.complete) arrival.complete.emplace(graphed.device.type());
    arrival.complete->record(
        c10::impl::VirtualGuardImpl(graphed.device.type()).getStream(graphed.device));
  }
  collect(kAhead);
}

void Steps::collect(size_t but) {
  if (!steps_) return;
  Graphed& graphed = *steps_;
  while (graphed.begun - graphed.collected > but) {
    graphed.step.wait(graphed.begun - graphed.collected - 1);  // notices a lost rank
    Arrival& arrival = graphed.arrivals[graphed.collected % graphed.arrivals.size()];
    if (arrival.complete) arrival.complete->synchronize();
    ++graphed.collected;
    known_.push_back({.loss = arrival.loss.item<double>(),
                      .grad_norm = arrival.norm.item<float>(),
                      .counted = graphed.counted * training_.world.size(),
                      .updated = !arrival.skipped.item<bool>(),
                      .stop = arrival.stop.item<int>() > 0,
                      .known = std::chrono::steady_clock::now()});
  }
}

std::optional<StepOutcome> Steps::outcome() {
  if (known_.empty()) return std::nullopt;
  StepOutcome oldest = known_.front();
  known_.pop_front();
  return oldest;
}

void Steps::finish() {
  collect(0);
}

bool Steps::host_is_ahead() const {
  return ahead_;
}

bool wants_graphs(const Training& training, int64_t steps) {
  const Config& config = training.config;
  const bool on = config.train.graph == GraphMode::kOn;
  if (config.train.graph == GraphMode::kOff) return false;
  if (training.world.device().is_cpu()) {
    if (on)
      throw Error("train.graph = on, but this run computes on the CPU, which has no CUDA graphs.",
                  "set it to auto.");
    return false;
  }
  return on || (!training.scaler && !config.data.document_mask && !config.data.loss_mask &&
                !config.offload.any() && config.activations.mode != ActivationsMode::kOffload &&
                steps >= kWorthIt);
}

}  // namespace fsdp::train
