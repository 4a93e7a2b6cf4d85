// fsdp bench units: the host's time of each event of a unit (touch, gather, reshard, reduce), and
// beside it what the collective's own call takes with buffers of the same size. What is left is
// ours.
//
// Two ways are taken. One event at a time, each the difference between a call that has the event in
// it and the same call without: prefetching is off, ranks start together, and a GPU is idle. And
// whole forwards and backwards of a model of many small units, as in training, less those of the
// same model unsharded, divided by the number of units.
//
// The command starts its own ranks, which run it again with --worker; rank 0 prints one JSON object
// an event.
#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/nn/modules/container/modulelist.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <iostream>

#include "base/subprocess.h"
#include "base/table.h"
#include "cli/bench.h"
#include "cli/bench_training.h"
#include "fsdp/fully_shard.h"

namespace fsdp::cli {
namespace {

using std::chrono::steady_clock;

constexpr double kGoal = 20;  // µs of our own an event

struct Options {
  std::string device = "cpu", backend;
  int ranks = 2;
  int units = 32;
  int64_t numel = 4096;  // of a unit
  int events = 320;      // of each kind that are timed
  bool json = false;
  bool worker = false;
};

// --- the model: a chain of units of one parameter, with as little computation as there can be ---

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

// Everybody here and nothing on the way.
void settle(const World& world) {
  synchronize(world.device());
  world.comm().barrier();
}

struct Found {
  std::string event;
  double call = 0;                     // µs of a call with the event in it, less one without
  double gathers = 0, reductions = 0;  // collectives in it
};

// Host time of the collectives' own calls, in buffers as the engine uses them.
struct Collectives {
  double all_gather = 0, reduce_scatter = 0;
};

Collectives time_collectives(const Options& options, const World& world) {
  const Communicator& comm = world.comm();
  int64_t part = (options.numel + world.size() - 1) / world.size(), full = part * world.size();
  at::Tensor gathered = comm.gather_buffer(full, at::kFloat, world.device());
  at::Tensor mine = gathered.narrow(0, world.rank() * part, part);
  at::Tensor gradients = comm.reduce_buffer(full, at::kFloat, world.device());
  at::Tensor sum = at::zeros({part}, gathered.options());
  std::vector<double> gathers, reductions;
  for (int i = -10; i < options.events; ++i) {
    settle(world);
    double gather = microseconds([&] { comm.all_gather(gathered, mine); });
    settle(world);
    double reduction = microseconds([&] { comm.reduce_scatter(sum, gradients); });
    if (i < 0) continue;
    gathers.push_back(gather);
    reductions.push_back(reduction);
  }
  return {median(gathers), median(reductions)};
}

// Touch, gather and reshard, of units one after the other.
std::vector<Found> time_one_by_one(const Options& options, const World& world) {
  torch::NoGradGuard no_grad;
  Chain chain(options.units, options.numel);
  auto sharded = fully_shard(chain, {.wrap = wrap::modules<Link>(),
                                     .device = world.device(),
                                     .forward_prefetch = 0,
                                     .backward_prefetch = 0});
  std::vector<double> touch, ready_touch, gather, reshard;
  int rounds = (options.events + options.units - 1) / options.units;
  for (int round = -1; round < rounds; ++round) {
    for (Link& link : chain->links) {
      Unit unit = unit_of(link);
      auto use = [&] { return microseconds([&] { link->weight.sum(); }); };
      unit.reshard();
      settle(world);
      double gathers = microseconds([&] { unit.unshard(); });
      settle(world);
      double plain = use();  // nothing of ours in it: a gathered unit's parameters are plain
      settle(world);
      double reshards = microseconds([&] { unit.reshard(); });
      settle(world);
      double touches = use();
      unit.reshard();
      settle(world);
      UnshardWork ahead = unit.unshard(/*async=*/true);
      settle(world);
      double ready_touches = use();
      ahead.wait();
      if (round < 0) continue;
      gather.push_back(gathers);
      reshard.push_back(reshards);
      touch.push_back(touches - plain);
      ready_touch.push_back(ready_touches - plain);
    }
  }
  return {{"gather: unit.unshard()", median(gather), 1},
          {"reshard: unit.reshard()", median(reshard)},
          {"touch, gathered ahead", median(ready_touch)},
          {"touch that gathers", median(touch), 1}};
}

// Backward through one unit that was used once.
Found time_reduce(const Options& options, const World& world) {
  auto time = [&](Link& link, const std::function<void()>& zero_grad) {
    at::Tensor x = at::ones({options.numel}, at::TensorOptions().device(world.device()));
    std::vector<double> times;
    for (int i = -10; i < options.events; ++i) {
      at::Tensor loss = link->forward(x).sum();
      settle(world);
      double took = microseconds([&] { loss.backward(); });
      zero_grad();
      if (i >= 0) times.push_back(took);
    }
    return median(times);
  };
  Link plain(options.numel), link(options.numel);
  plain->to(world.device());
  auto sharded = fully_shard(link, {.device = world.device()});
  double without = time(plain, [&] { plain->zero_grad(); });
  double with = time(link, [&] { sharded.zero_grad(); });
  return {"reduce: end of a unit's backward", with - without, 0, 1};
}

// Whole forwards and backwards; `gathers` and `reductions` as they were recorded.
std::vector<Found> time_steps_of_many(const Options& options, const World& world) {
  Chain plain(options.units, options.numel), chain(options.units, options.numel);
  plain->to(world.device());
  auto sharded = fully_shard(chain, {.wrap = wrap::modules<Link>(), .device = world.device()});
  at::Tensor x = at::ones({options.numel}, at::TensorOptions().device(world.device()));
  std::vector<double> forward, backward, plain_forward, plain_backward;
  auto step = [&](Chain& model, std::vector<double>& forwards, std::vector<double>& backwards) {
    at::Tensor loss;
    settle(world);
    forwards.push_back(microseconds([&] { loss = model->forward(x); }));
    settle(world);
    backwards.push_back(microseconds([&] { loss.backward(); }));
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
  chain->forward(x).backward();
  synchronize(world.device());
  double n = options.units, gathers[2] = {0, 0}, reductions = 0;
  for (const Event& event : sharded.events()) {
    if (event.kind == Event::kGatherIssued) gathers[event.backward] += 1 / n;
    if (event.kind == Event::kReduceIssued) reductions += 1 / n;
  }
  sharded.record_events(false);
  return {{"a unit's share of forward", (median(forward) - median(plain_forward)) / n, gathers[0]},
          {"a unit's share of backward", (median(backward) - median(plain_backward)) / n,
           gathers[1], reductions}};
}

int run_worker(const Options& options) {
  World world = init({.backend = options.backend});
  at::set_num_threads(1);
  Collectives collectives = time_collectives(options, world);
  std::vector<Found> all = time_one_by_one(options, world);
  all.push_back(time_reduce(options, world));
  for (Found& found : time_steps_of_many(options, world)) all.push_back(found);
  for (const Found& found : all) {
    double call =
        found.gathers * collectives.all_gather + found.reductions * collectives.reduce_scatter;
    if (world.rank() == 0)
      std::cout << Json{{"event", found.event},         {"call_us", found.call},
                        {"all_gathers", found.gathers}, {"reduce_scatters", found.reductions},
                        {"collective_us", call},        {"own_us", found.call - call}}
                       .dump()
                << std::endl;
  }
  world.comm().barrier();
  return 0;
}

// --- the parent ---

int run_parent(const Options& options) {
  std::vector<std::string> program = {own_binary(), "bench", "units", "--worker"};
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
               {"collective_us", "their calls us"},
               {"own_us", "our own us"},
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
  std::cout << "\n"
            << options.ranks << " ranks, " << options.backend << ", " << options.units
            << " units of " << with_separators(options.numel)
            << " float32. Medians of rank 0's host time, in microseconds, less the same call\n"
               "without sharding; their calls: the communicator's own, with buffers of that size. "
               "A unit's share of a whole\nforward or backward has several events in it: touch, "
               "gather (of the next one), reshard, and in backward\nthe gradient and its "
               "reduction.\n";
  return 0;
}

}  // namespace

void add_bench_units(CLI::App& bench, Action& action) {
  auto options = std::make_shared<Options>();
  CLI::App* command = bench.add_subcommand(
      "units",
      "Host time of a unit's events (touch, gather, reshard, reduce) beside the collective");
  command->add_option("--device", options->device, "cpu or cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  command->add_option("--backend", options->backend, "shm, mpi or nccl; what fits the device");
  auto count = [&](const char* name, auto& value, const char* help) {
    command->add_option(name, value, help)
        ->check(CLI::Range(1, 1 << 30).description(""))
        ->type_name("N")
        ->capture_default_str();
  };
  count("--ranks", options->ranks, "Ranks on this host");
  count("--units", options->units, "Units of the model");
  count("--numel", options->numel, "Elements of a unit");
  count("--events", options->events, "Events of each kind that are timed");
  command->add_flag("--json", options->json, "One JSON object a line");
  command->add_flag("--worker", options->worker, "")->group("");  // a rank of the above
  command->footer(
      "Examples:\n  fsdp bench units\n  fsdp bench units --device cuda --ranks 1\n"
      "  fsdp bench units --ranks 4 --numel 1048576 --json");
  command->callback([options, &action] {
    if (options->backend.empty()) options->backend = options->device == "cuda" ? "nccl" : "shm";
    action = [options] { return options->worker ? run_worker(*options) : run_parent(*options); };
  });
}

}  // namespace fsdp::cli
