// A rank of `fsdp bench offload`: times steps, then splits more steps into parts with LibTorch's
// profiler, and prints one JSON object.
#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <kineto/ActivityType.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <set>

#include "base/log.h"
#include "bench/offload.h"
#include "fsdp/error.h"
#include "fsdp/optim.h"
#include "shard/model.h"
#include "shard/update.h"
#include "train/device.h"

namespace fsdp::bench {
namespace {

using std::chrono::steady_clock;

constexpr const char* kAll = "fsdp bench: all steps";
constexpr const char* kLoading = "fsdp bench: data";

Offload offload_of(const OffloadBench& options) {
  if (options.worker == "off") return {};
  return {.parameters = options.worker == "everything",
          .optimizer = true,
          .fraction = options.fraction};
}

// Runs `steps` under the profiler, on every thread, and returns the nanoseconds of each part.
std::array<int64_t, kParts> take_apart(const std::function<void()>& steps) {
  namespace kineto = torch::autograd::profiler;
  namespace profiler = torch::profiler::impl;
  profiler::ExperimentalConfig experimental;
  experimental.profile_all_threads = true;  // updates run on their own threads
  profiler::ProfilerConfig config(profiler::ProfilerState::KINETO, false, false, false, false,
                                  false, experimental);
  std::set<profiler::ActivityType> activities{profiler::ActivityType::CPU};
  if (at::hasCUDA())
    activities.insert(profiler::ActivityType::CUDA);
  else
    setenv("KINETO_LOG_LEVEL", "99", /*overwrite=*/0);  // else Kineto logs that there is no GPU
  kineto::prepareProfiler(config, activities);
  kineto::enableProfiler(config, activities);
  {
    RECORD_USER_SCOPE(kAll);
    steps();
  }
  auto result = kineto::disableProfiler();

  std::vector<Span> spans;
  int64_t begin = 0, end = 0;
  for (const auto& event : result->events()) {
    const auto from = static_cast<int64_t>(event.startNs());
    const auto to = static_cast<int64_t>(event.endNs());
    const auto add = [&](Activity activity) { spans.push_back({activity, from, to}); };
    using libkineto::ActivityType;
    switch (static_cast<ActivityType>(event.activityType())) {
      case ActivityType::CONCURRENT_KERNEL:
        add(Activity::kKernel);
        break;
      case ActivityType::GPU_MEMCPY:
        add(Activity::kMemcpy);
        break;
      case ActivityType::GPU_MEMSET:
        add(Activity::kMemset);
        break;
      case ActivityType::CUDA_RUNTIME:
      case ActivityType::CUDA_DRIVER:
        add(Activity::kRuntime);
        break;
      case ActivityType::CPU_OP:
        add(Activity::kCpu);
        break;
      case ActivityType::USER_ANNOTATION:
        if (event.name() == kAll) begin = from, end = to;
        if (event.name() == kLoading) add(Activity::kLoading);
        if (event.name().ends_with(shard::kUpdateLabel)) add(Activity::kCpu);
        break;
      default:
        break;
    }
  }
  if (begin == end) throw Error("the profiler recorded no steps.", "run the benchmark again.");
  return split(spans, begin, end);
}

}  // namespace

int run_offload_rank(const OffloadBench& options) {
  World world = init({.backend = options.backend});
  at::set_num_threads(options.threads);
  Workload work = make_workload(options.shape, world, options.init == "device");
  const ShardOptions how = {
      .mixed_precision = options.grad_dtype.empty()
                             ? mixed_precision(options.shape)
                             : row_precision(options.shape, world, options.grad_dtype),
      .forward_prefetch = options.prefetch,
      .backward_prefetch = options.prefetch,
      .offload = offload_of(options)};
  Sharded sharded = shard_workload(work, world, how);
  AdamW optimizer(sharded, {.lr = 1e-4, .betas = {0.9, 0.95}, .weight_decay = 0.1});
  std::vector<at::Tensor> batch;  // as a data loader provides it
  for (const at::Tensor& input : work.inputs) batch.push_back(input.cpu());

  MemoryReport memory;  // after backward, when everything is allocated
  int begun = 0;
  steady_clock::time_point start;  // of the first timed step
  const auto forward = [&] {
    if (begun++ == options.warmup) start = steady_clock::now();
    std::vector<at::Tensor> inputs;
    {
      RECORD_USER_SCOPE(kLoading);
      for (const at::Tensor& input : batch) inputs.push_back(input.to(world.device()));
    }
    const auto parts = static_cast<double>(options.shape.accumulate);
    for (int64_t i = 1; i < options.shape.accumulate; ++i)
      (work.loss_of(inputs) / parts).backward();
    if (options.clip <= 0) optimizer.step_in_backward();  // for the last micro-batch
    return options.shape.accumulate > 1 ? work.loss_of(inputs) / parts : work.loss_of(inputs);
  };
  const auto clip = [&] {
    if (options.clip > 0) sharded.clip_grad_norm_(options.clip);
  };
  const auto update = [&] {
    memory = sharded.memory();
    optimizer.step();
    optimizer.zero_grad();
  };
  train::reset_peak_memory(world.device());
  Timing timing = time_steps({forward, clip, update}, options.warmup, options.steps, world);
  shard::await_updates(*shard::lock(sharded));
  const double all = std::chrono::duration<double>(steady_clock::now() - start).count();

  const int64_t held = memory.total() - memory.host;
  const double device = world.device().is_cpu() ? static_cast<double>(held)
                                                : train::peak_memory_mb(world.device()) * (1 << 20);
  Json line = line_of(timing);
  line.update(
      {{"ours", options.worker},
       {"world", world.size()},
       {"params", parameter_count(options.shape)},
       {"mean_ms", all * 1e3 / options.steps},  // includes the updates that step_ms leaves out
       {"device_bytes", device},
       {"host_bytes", memory.host}});
  if (!world.device().is_cpu()) {
    line["peak_alloc_mb"] = device / (1 << 20);
    line["gpu"] = train::device_name(world.device());
  }
  if (world.rank() == 0)
    if (auto mb = planned_mb(options.shape, world, how, {}, options.clip)) line["planned_mb"] = *mb;
  try {
    const auto parts = take_apart([&] {
      for (int i = 0; i < options.steps; ++i) {
        forward().backward();
        clip();
        update();
      }
      shard::await_updates(*shard::lock(sharded));
      train::synchronize(world.device());
    });
    for (size_t i = 0; i < kParts; ++i) line["parts"].push_back(parts[i] / options.steps);
  } catch (const std::exception& problem) {  // keep what was timed
    log::warn(std::string("the profiler failed, so the parts of a step are left out: ") +
              problem.what());
  }
  if (world.rank() == 0) std::cout << line.dump() << std::endl;
  world.comm().barrier();
  return 0;
}

}  // namespace fsdp::bench
