// fsdp bench strategies: memory, bytes sent and step time of each sharding strategy, on one model.
//
// Each strategy gets its own ranks, which run this command again with --worker. Rank 0 prints one
// JSON object; memory is that of the rank that holds most.
#include <ATen/Parallel.h>
#include <ATen/ops/tensor.h>

#include <iostream>

#include "base/log.h"
#include "base/subprocess.h"
#include "base/table.h"
#include "bench/benchmarks.h"
#include "bench/flags.h"
#include "bench/workload.h"
#include "fsdp/error.h"
#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "train/training.h"

namespace fsdp::bench {
namespace {

struct StrategiesOptions {
  Shape shape = {.layers = 4, .dim = 256, .heads = 4, .vocab = 2048, .seq = 64, .batch = 2};
  std::string device = "cpu", backend;
  int ranks = 4, threads = 1, steps = 10, warmup = 3;
  bool json = false;
  std::string worker;  // a strategy, if this process is a rank
  int parts = 0;       // for a rank: reshard_after_forward
};

// --- a rank ---

// HYBRID_SHARD here: two copies, each sharded over half of the ranks.
DeviceMesh mesh_of(ShardingStrategy strategy, const World& world) {
  if (strategy != ShardingStrategy::HYBRID_SHARD) return {};
  return DeviceMesh(world, {{"replicate", 2}, {"shard", world.size() / 2}});
}

// The largest over ranks.
int64_t largest(int64_t value, const World& world) {
  at::Tensor one = at::tensor({value}, at::kLong).to(world.device());
  world.comm().all_reduce(one, ReduceOp::MAX);
  return one.item<int64_t>();
}

int run_strategies_worker(const StrategiesOptions& options) {
  World world = init({.backend = options.backend});
  at::set_num_threads(options.threads);
  ShardingStrategy strategy = train::parse_strategy(options.worker);
  Workload work = make_workload(options.shape, world);
  ShardOptions how = {.wrap = work.wrap,
                      .strategy = strategy,
                      .mixed_precision = mixed_precision(options.shape),
                      .mesh = mesh_of(strategy, world),
                      .device = world.device()};
  if (options.parts > 0) how.reshard_after_forward = options.parts;
  auto sharded = fully_shard(work.module, how);
  AdamW optimizer(sharded, {.lr = 1e-4, .betas = {0.9, 0.95}, .weight_decay = 0.1});

  MemoryReport memory;  // after backward: states, gradients and gathered units
  int done = 0;
  auto update = [&] {
    memory = sharded.memory();
    optimizer.step();
    optimizer.zero_grad();
    if (++done == options.warmup) sharded.reset_traffic();
  };
  auto clip = [] {};
  Timing timing = time_steps({work.loss, clip, update}, options.warmup, options.steps, world);
  Traffic sent = sharded.traffic();

  Json line = {{"step_ms", timing.step * 1e3}, {"loss", timing.losses.back()}};
  auto add = [&](const char* key, int64_t bytes) { line[key] = largest(bytes, world); };
  add("parameters", memory.parameters);
  add("gathered_from", memory.gathered_from);
  add("gradients", memory.gradients);
  add("optimizer", memory.optimizer);
  add("unsharded", memory.unsharded);
  add("secondary", memory.secondary);
  add("reduce_buffers", memory.reduce_buffers);
  add("accumulated", memory.accumulated);
  add("total", memory.total());
  add("all_gather", sent.all_gather / options.steps);
  add("reduce_scatter", sent.reduce_scatter / options.steps);
  add("all_reduce", sent.all_reduce / options.steps);
  if (world.rank() == 0) std::cout << line.dump() << std::endl;
  world.comm().barrier();
  return 0;
}

// --- the parent ---

struct StrategyRow {
  ShardingStrategy strategy;
  int parts = 0;
  std::string title = name(strategy);
};

std::vector<StrategyRow> strategy_rows_of(const StrategiesOptions& options) {
  using enum ShardingStrategy;
  std::vector<StrategyRow> rows = {{FULL_SHARD}};
  bool halves = options.ranks % 2 == 0 && options.ranks > 2;
  if (halves) rows.push_back({FULL_SHARD, 2, "FULL_SHARD, keeps 1/2"});
  rows.push_back({SHARD_GRAD_OP});
  if (halves)
    rows.push_back({HYBRID_SHARD, 0, "HYBRID_SHARD 2 x " + std::to_string(options.ranks / 2)});
  else
    log::info(
        "HYBRID_SHARD and reshard_after_forward = 2 are left out: they need an even number of "
        "ranks, at least 4.");
  rows.push_back({NO_SHARD});
  return rows;
}

Json measure_strategies(const StrategiesOptions& options, const StrategyRow& row) {
  std::vector<std::string> program = {own_binary(), "strategies",
                                      "--worker",   name(row.strategy),
                                      "--parts",    std::to_string(row.parts),
                                      "--backend",  options.backend,
                                      "--threads",  std::to_string(options.threads),
                                      "--steps",    std::to_string(options.steps),
                                      "--warmup",   std::to_string(options.warmup)};
  for (const std::string& flag : flags_of(options.shape)) program.push_back(flag);
  return run_ranks({options.ranks, options.threads, program, row.title}).front();
}

int run_strategies_parent(const StrategiesOptions& options) {
  Table table({{"strategy", "strategy", Table::kLeft},
               {"parameters", "parameters"},
               {"gathered_from", ""},
               {"gradients", "gradients"},
               {"optimizer", "states"},
               {"unsharded", "gathered"},
               {"secondary", "kept part"},
               {"reduce_buffers", "reduce buffers"},
               {"accumulated", ""},
               {"total", "total"},
               {"all_gather", "all-gather"},
               {"reduce_scatter", "reduce-scatter"},
               {"all_reduce", "all-reduce"},
               {"step_ms", "step ms"},
               {"loss", "loss"}});
  for (const StrategyRow& row : strategy_rows_of(options)) {
    Json found = measure_strategies(options, row);
    auto bytes = [&](const char* key) {
      int64_t value = found[key].get<int64_t>();
      return Cell{value, value == 0 ? "-" : human_bytes(static_cast<double>(value))};
    };
    table.add({text(row.title), bytes("parameters"), bytes("gathered_from"), bytes("gradients"),
               bytes("optimizer"), bytes("unsharded"), bytes("secondary"), bytes("reduce_buffers"),
               bytes("accumulated"), bytes("total"), bytes("all_gather"), bytes("reduce_scatter"),
               bytes("all_reduce"), number(found["step_ms"].get<double>(), 1),
               number(found["loss"].get<double>(), 6)});
  }
  table.print(std::cout, options.json);
  if (options.json) return 0;
  std::cout
      << "\n"
      << description(options.shape) << "; " << options.ranks << " ranks x " << options.threads
      << " threads, " << options.backend << "\n"
      << "Memory: after backward, on the rank that holds most. Collectives: bytes that a rank "
         "sends per step without\nshared memory: n (W-1) for an all-gather of n from each of W "
         "ranks and for a reduce-scatter to n, 2 n (W-1)/W\nfor an all-reduce of n. Time: "
         "rank 0's median of "
      << options.steps << " steps after " << options.warmup << " for warm-up.\n";
  return 0;
}

}  // namespace

void add_strategies(CLI::App& bench, Action& action) {
  auto options = std::make_shared<StrategiesOptions>();
  CLI::App* command = bench.add_subcommand(
      "strategies", "Compare memory, bytes sent and step time of the sharding strategies");
  add_device(*command, options->device);
  command->add_option("--backend", options->backend,
                      "shm, mpi or nccl; default: shm on the CPU, nccl on a GPU");
  add_count(*command, "--ranks", options->ranks, "Ranks on this host");
  add_count(*command, "--threads", options->threads, "Threads per rank");
  add_count(*command, "--steps", options->steps, "Timed steps");
  add_count(*command, "--warmup", options->warmup, "Warm-up steps");
  command->add_flag("--json", options->json, "One JSON object per line");
  command->add_option("--worker", options->worker, "")->group("");  // a rank of the above
  command->add_option("--parts", options->parts, "")->group("");
  add_shape_flags(*command, options->shape);
  command->footer(
      "Examples:\n  fsdp bench strategies\n  fsdp bench strategies --ranks 8 --model mlp --width "
      "1024\n  fsdp bench strategies --dtype bf16 --json");
  command->callback([options, &action] {
    if (options->backend.empty()) options->backend = options->device == "cuda" ? "nccl" : "shm";
    action = [options] {
      return options->worker.empty() ? run_strategies_parent(*options)
                                     : run_strategies_worker(*options);
    };
  });
}

}  // namespace fsdp::bench
