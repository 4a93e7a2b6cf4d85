// fsdp bench offload: what offload costs in time and saves in memory, on one model: the step
// without it, with optimizer states in host memory, and with everything there.
//
// Each row gets ranks of its own, which run this command again with --worker; rank 0 prints one
// JSON object. Steps are timed first, then some more are taken apart by LibTorch's profiler.
#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <kineto/ActivityType.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <cstdlib>
#include <iostream>
#include <set>

#include "base/subprocess.h"
#include "base/table.h"
#include "cli/bench.h"
#include "cli/bench_flags.h"
#include "cli/bench_training.h"
#include "cli/step_split.h"
#include "fsdp/error.h"
#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "shard/update.h"
#include "train/device.h"

namespace fsdp::cli {
namespace {

struct Options {
  Shape shape = {.layers = 4, .dim = 256, .heads = 4, .vocab = 2048, .seq = 64, .batch = 2};
  std::string device = "cpu", backend;
  int ranks = 1, threads = 1, steps = 10, warmup = 3, prefetch = 1;
  double clip = 1.0, fraction = 1.0;
  bool json = false;
  std::string worker;  // a row: this process is a rank
};

struct Row {
  const char* name;
  Offload offload;
};

std::vector<Row> rows_of(const Options& options) {
  return {{"off", {}},
          {"optimizer", {.optimizer = true, .fraction = options.fraction}},
          {"everything", {.parameters = true, .optimizer = true, .fraction = options.fraction}}};
}

// --- a rank ---

constexpr const char* kAll = "fsdp bench: all steps";
constexpr const char* kLoading = "fsdp bench: data";

void wait_for_device(at::Device device) {
  if (!device.is_cpu())
    c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

// Runs `steps` under the profiler, of every thread.
std::array<int64_t, kParts> take_apart(const std::function<void()>& steps) {
  namespace kineto = torch::autograd::profiler;
  namespace profiler = torch::profiler::impl;
  profiler::ExperimentalConfig experimental;
  experimental.profile_all_threads = true;  // updates have their own
  profiler::ProfilerConfig config(profiler::ProfilerState::KINETO, false, false, false, false,
                                  false, experimental);
  std::set<profiler::ActivityType> activities{profiler::ActivityType::CPU};
  if (at::hasCUDA())
    activities.insert(profiler::ActivityType::CUDA);
  else
    setenv("KINETO_LOG_LEVEL", "99", /*overwrite=*/0);  // else it says that there is no GPU
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
  if (begin == end) throw Error("the profiler has not seen the steps.", "run it once more.");
  return split(spans, begin, end);
}

int run_worker(const Options& options) {
  World world = init({.backend = options.backend});
  at::set_num_threads(options.threads);
  Workload work = make_workload(options.shape, world);
  ShardOptions how = {.wrap = work.wrap,
                      .mixed_precision = mixed_precision(options.shape),
                      .device = world.device(),
                      .forward_prefetch = options.prefetch,
                      .backward_prefetch = options.prefetch};
  for (const Row& row : rows_of(options))
    if (options.worker == row.name) how.offload = row.offload;
  auto sharded = fully_shard(work.module, how);
  AdamW optimizer(sharded, {.lr = 1e-4, .betas = {0.9, 0.95}, .weight_decay = 0.1});
  std::vector<at::Tensor> batch;  // as a loader would hand it out
  for (const at::Tensor& input : work.inputs) batch.push_back(input.cpu());

  MemoryReport memory;  // when all there is at once is there
  const auto forward = [&] {
    std::vector<at::Tensor> inputs;
    {
      RECORD_USER_SCOPE(kLoading);
      for (const at::Tensor& input : batch) inputs.push_back(input.to(world.device()));
    }
    return work.loss_of(inputs);
  };
  const auto clip = [&] {
    if (options.clip > 0) sharded.clip_grad_norm_(options.clip);
  };
  const auto update = [&] {
    memory = sharded.memory();
    optimizer.step();
    optimizer.zero_grad();
  };
  if (!world.device().is_cpu())
    c10::getDeviceAllocator(world.device().type())->resetPeakStats(world.device().index());
  Timing timing = time_steps({forward, clip, update}, options.warmup, options.steps, world);
  const auto parts = take_apart([&] {
    for (int i = 0; i < options.steps; ++i) {
      forward().backward();
      clip();
      update();
    }
    shard::await_updates(*sharded.model());
    wait_for_device(world.device());
  });

  const int64_t held = memory.total() - memory.host;
  const double device = world.device().is_cpu() ? static_cast<double>(held)
                                                : train::peak_memory_mb(world.device()) * (1 << 20);
  Json line = {{"step_ms", timing.step * 1e3},
               {"loss", timing.last_loss},
               {"device_bytes", device},
               {"host_bytes", memory.host}};
  for (size_t i = 0; i < kParts; ++i) line["parts"].push_back(parts[i] / options.steps);
  if (world.rank() == 0) std::cout << line.dump() << std::endl;
  world.comm().barrier();
  return 0;
}

// --- the parent ---

Json measure(const Options& options, const Row& row) {
  std::vector<std::string> program = {own_binary(),
                                      "bench",
                                      "offload",
                                      "--worker",
                                      row.name,
                                      "--backend",
                                      options.backend,
                                      "--threads",
                                      std::to_string(options.threads),
                                      "--steps",
                                      std::to_string(options.steps),
                                      "--warmup",
                                      std::to_string(options.warmup),
                                      "--prefetch",
                                      std::to_string(options.prefetch),
                                      "--clip",
                                      std::to_string(options.clip),
                                      "--fraction",
                                      std::to_string(options.fraction)};
  for (const std::string& flag : flags_of(options.shape)) program.push_back(flag);
  return run_ranks({options.ranks, options.threads, program, row.name}).front();
}

std::string percent(int64_t hundredths) {
  const std::string rest = std::to_string(hundredths % 100);
  return std::to_string(hundredths / 100) + "." + (rest.size() < 2 ? "0" : "") + rest;
}

int run_parent(const Options& options) {
  Table table({{"offload", "offload", Table::kLeft},
               {"device_bytes", "device"},
               {"host_bytes", "host"},
               {"step_ms", "step ms"},
               {"loss", "loss"}});
  Table parts({{"offload", "offload", Table::kLeft},
               {"part", "of a step", Table::kLeft},
               {"us", "us"},
               {"percent", "%"}});
  for (const Row& row : rows_of(options)) {
    Json found = measure(options, row);
    auto bytes = [&](const char* key) {
      const double value = found[key].get<double>();
      return Cell{static_cast<int64_t>(value), value == 0 ? "-" : human_bytes(value)};
    };
    table.add({text(row.name), bytes("device_bytes"), bytes("host_bytes"),
               number(found["step_ms"].get<double>(), 1), number(found["loss"].get<double>(), 6)});
    std::array<int64_t, kParts> ns{};
    for (size_t i = 0; i < kParts; ++i) ns[i] = found["parts"][i].get<int64_t>();
    const auto share = shares(ns);
    for (size_t i = 0; i < kParts; ++i)
      parts.add({text(row.name), text(part_name(i)), number(static_cast<double>(ns[i]) / 1e3, 0),
                 Cell{static_cast<double>(share[i]) / 100, percent(share[i])}});
  }
  table.print(std::cout, options.json);
  if (!options.json) std::cout << "\n";
  parts.print(std::cout, options.json);
  if (options.json) return 0;
  std::cout << "\n"
            << description(options.shape) << "; " << options.ranks << " ranks x " << options.threads
            << " threads, " << options.backend << "\n"
            << (options.device == "cpu"
                    ? "Memory: what the engine holds after backward, of rank 0"
                    : "Memory: the allocator's peak on rank 0's device; what lies on the host")
            << ". Time: its median of " << options.steps << " steps after " << options.warmup
            << ";\nthe parts are those of as many steps more, under the profiler, which costs time "
               "itself.\n";
  return 0;
}

}  // namespace

void add_bench_offload(CLI::App& bench, Action& action) {
  auto options = std::make_shared<Options>();
  CLI::App* command = bench.add_subcommand(
      "offload", "Memory, time and what a step spends it on, without and with offload to the host");
  add_device(*command, options->device);
  command->add_option("--backend", options->backend, "shm, mpi or nccl; what fits the device");
  add_count(*command, "--ranks", options->ranks, "Ranks on this host");
  add_count(*command, "--threads", options->threads,
            "Threads of each rank; they update what is offloaded");
  add_count(*command, "--steps", options->steps, "Steps that are timed");
  add_count(*command, "--warmup", options->warmup, "Steps before them");
  add_count(*command, "--prefetch", options->prefetch, "Units gathered ahead; each takes memory",
            0);
  command->add_option("--clip", options->clip, "Largest norm of the gradients; 0: not clipped")
      ->capture_default_str();
  command->add_option("--fraction", options->fraction, "Share of the model that is offloaded")
      ->check(CLI::Range(0.0, 1.0).description(""))
      ->capture_default_str();
  command->add_flag("--json", options->json, "One JSON object a line");
  command->add_option("--worker", options->worker, "")->group("");  // a rank of the above
  add_shape_flags(*command, options->shape);
  command->footer(
      "Examples:\n  fsdp bench offload\n  fsdp bench offload --device cuda --threads 16 --dtype "
      "bf16\n  fsdp bench offload --model mlp --width 1024 --clip 0 --json");
  command->callback([options, &action] {
    if (options->backend.empty()) options->backend = options->device == "cuda" ? "nccl" : "shm";
    action = [options] {
      return options->worker.empty() ? run_parent(*options) : run_worker(*options);
    };
  });
}

}  // namespace fsdp::cli
