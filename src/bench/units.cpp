// fsdp bench units: host time of each event of a unit (touch, gather, reshard, reduce), and how
// much of it was spent inside the collective's call. The rest is ours.
//
// Measured in two ways. One event at a time: the difference between a call with the event and the
// same call without; prefetching is off, ranks start together, and a GPU is idle. And whole
// forwards and backwards of a model of many small units, as in training, minus those of the same
// model unsharded, divided by the number of units.
//
// The command launches its own ranks, which run it again with --worker; rank 0 prints one JSON
// object per event.
#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/nn/modules/container/modulelist.h>

#include <chrono>
#include <iostream>

#include "base/subprocess.h"
#include "base/table.h"
#include "bench/benchmarks.h"
#include "bench/flags.h"
#include "bench/workload.h"
#include "fsdp/fully_shard.h"
#include "train/device.h"

namespace fsdp::bench {
namespace {

using std::chrono::steady_clock;

constexpr double kGoal = 20;  // µs of our own per event

struct UnitsOptions {
  std::string device = "cpu", backend;
  int ranks = 2;
  int units = 32;
  int64_t numel = 4096;  // per unit
  int events = 320;      // timed per kind
  bool json = false;
  bool worker = false;
};

// --- the model: a chain of units with one parameter each and as little computation as possible ---

struct LinkImpl : torch::nn::Module {
  explicit LinkImpl(int64_t numel) { weight = register_parameter("weight", at::ones({numel})); }
  at::Tensor forward(const at::Tensor& x) { return x * weight; }
  at::Tensor weight;
};
TORCH_MODULE(Link);

struct ChainImpl : torch::nn::Module {
  ChainImpl(int units, int64_t numel) {
    register_module("links", list);
    for (int i = 0; i < units; ++i) {
      links.emplace_back(numel);
      list->push_back(links.back());
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (Link& link : links) x = link->forward(x);
    return x.sum();
  }
  torch::nn::ModuleList list;
  std::vector<Link> links;
};
TORCH_MODULE(Chain);

// --- a rank ---

double microseconds(const std::function<void()>& call) {
  auto start = steady_clock::now();
  call();
  return std::chrono::duration<double, std::micro>(steady_clock::now() - start).count();
}

// Waits until all ranks are here and nothing is in flight.
void settle(const World& world) {
  train::synchronize(world.device());
  world.comm().barrier();
}

struct Found {
  std::string event;
  double call = 0;                     // µs of a call with the event, minus one without
  double theirs = 0;                   // of that, µs inside the communicators' calls
  double gathers = 0, reductions = 0;  // collectives in the call
};

// Host µs of a call, and how many of them the engine spent inside communicators.
struct Cost {
  double host = 0, theirs = 0;
};

Cost cost_of(const Sharded& sharded, const std::function<void()>& call) {
  sharded.reset_traffic();
  double host = microseconds(call);
  return {host, std::chrono::duration<double, std::micro>(sharded.traffic().host_time).count()};
}

double median_theirs(const std::vector<Cost>& costs) {
  std::vector<double> times;
  for (const Cost& cost : costs) times.push_back(cost.theirs);
  return median(times);
}

double median_host(const std::vector<Cost>& costs) {
  std::vector<double> times;
  for (const Cost& cost : costs) times.push_back(cost.host);
  return median(times);
}

// The medians of `costs`, minus the same call without sharding.
Found found(std::string event, const std::vector<Cost>& costs, double gathers = 0,
            double reductions = 0, double without = 0, double share = 1) {
  return {std::move(event), (median_host(costs) - without) / share, median_theirs(costs) / share,
          gathers, reductions};
}

// Touch, gather and reshard, one unit after the other.
std::vector<Found> time_one_by_one(const UnitsOptions& options, const World& world) {
  torch::NoGradGuard no_grad;
  Chain chain(options.units, options.numel);
  auto sharded = fully_shard(chain, {.wrap = wrap::modules<Link>(),
                                     .device = world.device(),
                                     .forward_prefetch = 0,
                                     .backward_prefetch = 0});
  std::vector<Cost> touch, ready_touch, gather, reshard;
  int rounds = (options.events + options.units - 1) / options.units;
  for (int round = -1; round < rounds; ++round) {
    for (Link& link : chain->links) {
      Unit unit = unit_of(link);
      auto use = [&] { return cost_of(sharded, [&] { link->weight.sum(); }); };
      unit.reshard();
      settle(world);
      Cost gathers = cost_of(sharded, [&] { unit.unshard(); });
      settle(world);
      double plain =
          use().host;  // without our code: a gathered unit's parameters are plain tensors
      settle(world);
      Cost reshards = cost_of(sharded, [&] { unit.reshard(); });
      settle(world);
      Cost touches = use();
      unit.reshard();
      settle(world);
      UnshardHandle ahead = unit.unshard(/*async_op=*/true);
      settle(world);
      Cost ready_touches = use();
      ahead.wait();
      if (round < 0) continue;
      gather.push_back(gathers);
      reshard.push_back(reshards);
      touch.push_back({touches.host - plain, touches.theirs});
      ready_touch.push_back({ready_touches.host - plain, ready_touches.theirs});
    }
  }
  sharded.reset_traffic();
  unit_of(chain->links[0]).reshard();
  unit_of(chain->links[0]).unshard();
  double there = sharded.traffic().all_gather > 0 ? 1 : 0;  // over shared memory nothing is sent
  return {found("gather: unit.unshard()", gather, there), found("reshard: unit.reshard()", reshard),
          found("touch, gathered ahead", ready_touch), found("touch that gathers", touch, there)};
}

// Backward through one unit that was used once.
Found time_reduce(const UnitsOptions& options, const World& world) {
  auto time = [&](Link& link, const std::function<Cost(const std::function<void()>&)>& measure,
                  const std::function<void()>& zero_grad) {
    at::Tensor x = at::ones({options.numel}, at::TensorOptions().device(world.device()));
    std::vector<Cost> costs;
    for (int i = -10; i < options.events; ++i) {
      at::Tensor loss = link->forward(x).sum();
      settle(world);
      Cost cost = measure([&] { loss.backward(); });
      zero_grad();
      if (i >= 0) costs.push_back(cost);
    }
    return costs;
  };
  Link plain(options.numel), link(options.numel);
  plain->to(world.device());
  auto sharded = fully_shard(link, {.device = world.device()});
  auto without = time(
      plain, [](const auto& call) { return Cost{microseconds(call)}; },
      [&] { plain->zero_grad(); });
  auto with = time(
      link, [&](const auto& call) { return cost_of(sharded, call); }, [&] { sharded.zero_grad(); });
  return found("reduce: end of a unit's backward", with, 0, world.size() > 1 ? 1 : 0,
               median_host(without));
}

// Whole forwards and backwards; `gathers` and `reductions` as they were recorded.
std::vector<Found> time_steps_of_many(const UnitsOptions& options, const World& world) {
  Chain plain(options.units, options.numel), chain(options.units, options.numel);
  plain->to(world.device());
  auto sharded = fully_shard(chain, {.wrap = wrap::modules<Link>(), .device = world.device()});
  at::Tensor x = at::ones({options.numel}, at::TensorOptions().device(world.device()));
  std::vector<Cost> forward, backward, plain_forward, plain_backward;
  auto step = [&](Chain& model, std::vector<Cost>& forwards, std::vector<Cost>& backwards) {
    at::Tensor loss;
    settle(world);
    forwards.push_back(cost_of(sharded, [&] { loss = model->forward(x); }));
    settle(world);
    backwards.push_back(cost_of(sharded, [&] { loss.backward(); }));
  };
  int rounds = std::max(5, options.events / options.units);
  for (int round = -3; round < rounds; ++round) {
    if (round == 0)
      for (auto* times : {&forward, &backward, &plain_forward, &plain_backward}) times->clear();
    step(plain, plain_forward, plain_backward);
    plain->zero_grad();
    step(chain, forward, backward);
    sharded.zero_grad();
  }
  sharded.record_events(true);
  sharded.reset_traffic();
  chain->forward(x).backward();
  train::synchronize(world.device());
  bool sent = sharded.traffic().all_gather > 0;
  double n = options.units, gathers[2] = {0, 0}, reductions = 0;
  for (const Event& event : sharded.events()) {
    if (world.size() == 1) break;
    if (event.kind == Event::kGatherIssued && sent) gathers[event.backward] += 1 / n;
    if (event.kind == Event::kReduceIssued) reductions += 1 / n;
  }
  sharded.record_events(false);
  return {found("a unit's share of forward", forward, gathers[0], 0, median_host(plain_forward), n),
          found("a unit's share of backward", backward, gathers[1], reductions,
                median_host(plain_backward), n)};
}

int run_units_worker(const UnitsOptions& options) {
  World world = init({.backend = options.backend});
  at::set_num_threads(1);
  std::vector<Found> all = time_one_by_one(options, world);
  all.push_back(time_reduce(options, world));
  for (Found& found : time_steps_of_many(options, world)) all.push_back(found);
  for (const Found& found : all)
    if (world.rank() == 0)
      std::cout << Json{{"event", found.event},          {"call_us", found.call},
                        {"all_gathers", found.gathers},  {"reduce_scatters", found.reductions},
                        {"collective_us", found.theirs}, {"own_us", found.call - found.theirs}}
                       .dump()
                << std::endl;
  world.comm().barrier();
  return 0;
}

// --- the parent ---

int run_units_parent(const UnitsOptions& options) {
  std::vector<std::string> program = {own_binary(), "units", "--worker"};
  auto flag = [&](const char* name, const std::string& value) {
    program.push_back(name);
    program.push_back(value);
  };
  flag("--backend", options.backend);
  flag("--units", std::to_string(options.units));
  flag("--numel", std::to_string(options.numel));
  flag("--events", std::to_string(options.events));
  Table table({{"event", "event", Table::kLeft},
               {"call_us", "host us"},
               {"all_gathers", "all-gathers"},
               {"reduce_scatters", "reduce-scatters"},
               {"collective_us", "collective us"},
               {"own_us", "own us"},
               {"goal_us", "goal", Table::kLeft}});
  for (const Json& row : run_ranks({options.ranks, 1, program, "unit events"})) {
    auto real = [&](const char* key, int digits) { return number(row[key].get<double>(), digits); };
    auto count = [&](const char* key) {
      double value = row[key].get<double>();
      return value == 0 ? Cell{value, "-"} : number(value, 2);
    };
    Cell own = real("own_us", 1);
    own.colour = row["own_us"].get<double>() <= kGoal ? "32" : "31";
    table.add({text(row["event"]),
               real("call_us", 1),
               count("all_gathers"),
               count("reduce_scatters"),
               real("collective_us", 1),
               own,
               {kGoal, "<= " + number(kGoal, 0).text}});
  }
  table.print(std::cout, options.json);
  if (options.json) return 0;
  std::cout
      << "\n"
      << options.ranks << " ranks, " << options.backend << ", " << options.units << " units of "
      << with_separators(options.numel)
      << " float32. Medians of rank 0's host time in microseconds, minus the same call\n"
         "without sharding. collective: time inside the communicators' calls. A unit's share "
         "of a whole forward or\nbackward includes several events: touch, gather (of the next "
         "unit), reshard, and in backward the gradient\nand its reduction.\n";
  return 0;
}

}  // namespace

void add_units(CLI::App& bench, Action& action) {
  auto options = std::make_shared<UnitsOptions>();
  CLI::App* command =
      bench.add_subcommand("units", "Host time of a unit's events: touch, gather, reshard, reduce");
  add_device(*command, options->device);
  command->add_option("--backend", options->backend,
                      "shm, mpi or nccl; default: shm on the CPU, nccl on a GPU");
  add_count(*command, "--ranks", options->ranks, "Ranks on this host", 1, 1 << 30);
  add_count(*command, "--units", options->units, "Units in the model", 1, 1 << 30);
  add_count(*command, "--numel", options->numel, "Elements per unit", 1, 1 << 30);
  add_count(*command, "--events", options->events, "Timed events per kind", 1, 1 << 30);
  command->add_flag("--json", options->json, "One JSON object per line");
  command->add_flag("--worker", options->worker, "")->group("");  // a rank of the above
  command->footer(
      "Examples:\n  fsdp bench units\n  fsdp bench units --device cuda --ranks 1\n"
      "  fsdp bench units --ranks 4 --numel 1048576 --json");
  command->callback([options, &action] {
    if (options->backend.empty()) options->backend = options->device == "cuda" ? "nccl" : "shm";
    action = [options] {
      return options->worker ? run_units_worker(*options) : run_units_parent(*options);
    };
  });
}

}  // namespace fsdp::bench
