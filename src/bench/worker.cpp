// A rank of a benchmark of training steps.
#include <ATen/ops/tensor.h>
#include <ATen/record_function.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>

#include "base/format.h"
#include "base/log.h"
#include "bench/benchmarks.h"
#include "bench/training.h"
#include "fsdp/recompute.h"
#include "observe/trace.h"
#include "shard/model.h"
#include "shard/update.h"
#include "train/device.h"

namespace fsdp::bench {
namespace {

using std::chrono::steady_clock;

// Sums or maxima over ranks of each value.
std::vector<double> reduced(const std::vector<double>& values, ReduceOp how, const World& world) {
  at::Tensor all = at::tensor(values, at::kDouble).to(world.device());
  world.comm().all_reduce(all, how);
  all = all.cpu();
  return {all.const_data_ptr<double>(), all.const_data_ptr<double>() + all.numel()};
}

double peak_reserved_mb(at::Device device) {
  if (device.is_cpu()) return train::peak_memory_mb(device);
  const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  constexpr auto kAggregate = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return static_cast<double>(stats.reserved_bytes[kAggregate].peak) / (1 << 20);
}

void add_losses(Json& line, std::vector<double> losses, bool of_all_ranks, const World& world) {
  if (!of_all_ranks && world.size() > 1) {
    losses = reduced(losses, ReduceOp::SUM, world);
    for (double& loss : losses) loss /= world.size();
  }
  line["loss0"] = losses.front();
  line["loss"] = losses.back();
  for (double& loss : losses) loss = std::round(loss * 1e4) / 1e4;  // as the peer rounds them
  line["losses"] = losses;
}

void add_gpu(Json& line, const World& world) {
  if (world.device().is_cpu()) return;
  line["gpu"] = train::device_name(world.device());
  const int there = c10::impl::VirtualGuardImpl(world.device().type()).deviceCount();
  line["devices"] = std::min(there, world.size());
}

// Times are medians over steps on the host's clock, step_ms until the device is done, the others
// until the host has launched the work. mean_ms also waits for updates on the host.
Json time_steps(const Training& training, const Row& row, const World& world) {
  constexpr std::array kStages = {"forward_ms", "backward_ms", "clip_ms", "update_ms"};
  Samples ms;
  std::vector<double> losses;
  const bool sharded = !training.plain;
  steady_clock::time_point first;
  for (int i = -row.warmup; i < row.steps; ++i) {
    if (i + row.warmup == training.settled) train::reset_peak_memory(world.device());
    if (i == 0) {
      world.comm().barrier();
      if (sharded) training.sharded.reset_traffic();
      ms = {};
      first = steady_clock::now();
    }
    std::array<double, kStages.size()> stages{};
    const auto start = steady_clock::now();
    double before = 0;
    const at::Tensor loss = take_step(training, row, [&](Stage stage) {
      const double now = seconds_since(start);
      stages[static_cast<size_t>(stage)] += now - before;
      before = now;
    });
    ms.add("cpu_issue_ms", seconds_since(start) * 1e3);
    train::synchronize(world.device());
    ms.add("step_ms", seconds_since(start) * 1e3);
    losses.push_back(loss.item<double>());
    for (size_t stage = 0; stage < stages.size() && !training.graph; ++stage)
      ms.add(kStages[stage], stages[stage] * 1e3);
  }
  if (sharded) shard::await_updates(*shard::lock(training.sharded));
  const double mean = seconds_since(first) / row.steps, step = ms.median("step_ms") / 1e3;
  Json line = {{"ours", row.mode},
               {"world", world.size()},
               {"params", training.work.trainee.parameters},
               {"best_ms", std::ranges::min(ms.all["step_ms"])},
               {"mean_ms", mean * 1e3},
               {"tok_s_rank", static_cast<double>(tokens_of(row)) / step},
               {"tflops_rank", flops_of(row) / step / 1e12},
               {"peak_alloc_mb", train::peak_memory_mb(world.device())},
               {"peak_reserved_mb", peak_reserved_mb(world.device())},
               {"maxrss_mb", train::peak_memory_mb(at::kCPU)}};
  ms.fill(line);
  add_losses(line, losses, /*of_all_ranks=*/training.graph != nullptr, world);
  add_gpu(line, world);
  return line;
}

// Takes one more step and records what the engine and autograd keep at the end of forward, and what
// the engine keeps after backward: in total on rank 0; by kind, and with the bytes sent per step,
// on the rank that has most.
void add_memory(Json& line, const Training& training, const Row& row, const World& world) {
  const auto mb = [](int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
  const bool cpu = world.device().is_cpu();
  const Traffic sent = training.sharded.traffic();
  MemoryReport memory;
  training.sharded.count_activations(true);
  train::reset_peak_memory(world.device());
  take_step(training, row, [&](Stage stage) {
    if (stage != Stage::kForward && stage != Stage::kBackward) return;
    memory = training.sharded.memory();
    const std::string when = stage == Stage::kForward ? "forward" : "backward";
    line[when + "_memory_mb"] = mb(memory.total());
    if (stage == Stage::kForward) line["activations_mb"] = mb(memory.activations);
    if (!cpu) line[when + "_peak_mb"] = train::peak_memory_mb(world.device());
  });
  training.sharded.count_activations(false);
  line["device_bytes"] = cpu ? memory.total() - memory.host
                             : std::llround(line["peak_alloc_mb"].get<double>() * (1 << 20));
  line["host_bytes"] = memory.host;
  const auto add = [&](const char* kind, int64_t bytes) {
    line[kind] =
        static_cast<int64_t>(reduced({static_cast<double>(bytes)}, ReduceOp::MAX, world).front());
  };
  add("parameters", memory.parameters);
  add("gathered_from", memory.gathered_from);
  add("gradients", memory.gradients);
  add("optimizer", memory.optimizer);
  add("unsharded", memory.unsharded);
  add("secondary", memory.secondary);
  add("reduce_buffers", memory.reduce_buffers);
  add("accumulated", memory.accumulated);
  add("total", memory.total());
  add("all_gather", sent.all_gather / row.steps);
  add("reduce_scatter", sent.reduce_scatter / row.steps);
  add("all_reduce", sent.all_reduce / row.steps);
}

// Takes as many steps again under the profiler and records the nanoseconds of each part of a step.
void add_parts(Json& line, const Training& training, const Row& row) {
  try {
    observe::Trace trace;
    trace.start(/*all_threads=*/true);  // updates run on their own threads
    {
      RECORD_USER_SCOPE(observe::kSplitScope);
      for (int i = 0; i < row.steps; ++i) take_step(training, row);
      shard::await_updates(*shard::lock(training.sharded));
      train::synchronize(training.device);
    }
    for (const int64_t part : trace.split()) line["parts"].push_back(part / row.steps);
  } catch (const std::exception& problem) {  // keep what was timed
    log::warn(
        formatted("the profiler failed, so the parts of a step are left out: {}", problem.what()));
  }
}

// --- the cost of recording for recomputation (docs/recompute.md) ---

// Times forwards without a policy and with one that records every block. The two alternate in one
// process, so that a slow period affects both. After each switch one step isn't timed: the engine
// checks the parameters again.
Json time_tape(Row row, const World& world) {
  constexpr int kTurn = 4;  // timed forwards between two switches
  row.accumulate = 1;
  row.clip = 0;
  row.activations = "none";
  const Training training = make_training(row, world);
  const RecomputePolicy policy(training.work.trainee.blocks);
  Json line = {{"ours", row.mode}, {"world", world.size()}};
  Samples ms;
  const auto forward = [&](const std::string& prefix, bool counts) {
    train::synchronize(training.device);
    const auto start = steady_clock::now();
    double host = 0, whole = 0;
    const at::Tensor loss = take_step(training, row, [&](Stage stage) {
      if (stage != Stage::kForward) return;
      host = seconds_since(start) * 1e3;
      train::synchronize(training.device);
      whole = seconds_since(start) * 1e3;
    });
    if (!counts) return;
    ms.add(prefix + "forward_host_ms", host);
    ms.add(prefix + "forward_ms", whole);
    line[prefix + "loss"] = loss.item<double>();
  };
  for (int i = 0; i < row.warmup; ++i) forward("", /*counts=*/false);
  for (int turn = 0; turn * kTurn < row.steps; ++turn)
    for (const bool records : {false, true}) {
      if (records)
        apply_activation_checkpointing(training.sharded, policy);
      else if (turn > 0)
        remove_activation_checkpointing(training.sharded);
      for (int i = -1; i < kTurn; ++i) forward(records ? "recorded_" : "", i >= 0);
    }
  const double without = ms.median("forward_ms"), with = ms.median("recorded_forward_ms");
  line["step_ms"] = with;  // every line has it
  line["more_percent"] = (with / without - 1) * 100;
  ms.fill(line);
  add_gpu(line, world);
  return line;
}

}  // namespace

std::vector<Json> train_row(const Row& row, const World& world) {
  if (row.mode == "tape") return {time_tape(row, world)};
  const Training training = make_training(row, world);
  Json line = time_steps(training, row, world);
  if (training.graph) {
    line["replayed"] = training.graph->replayed() ? 1 : 0;
    line["recordings"] = training.graph->recordings();
    if (!training.graph->why_eager().empty()) line["why_eager"] = training.graph->why_eager();
  }
  if (row.memory) add_memory(line, training, row, world);
  if (row.plan && !training.plain && world.rank() == 0)
    if (const auto mb = planned_mb(row, world)) line["planned_mb"] = *mb;
  if (offload_mode(row)) add_parts(line, training, row);
  return {line};
}

}  // namespace fsdp::bench
