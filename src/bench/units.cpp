// fsdp bench units: host time of each event of a unit (touch, gather, reshard, reduce), and how
// much of it was spent inside the collective's call. The rest is ours.
//
// Measured in two ways. One event at a time: the difference between a call with the event and the
// same call without; prefetching is off, ranks start together, and a GPU is idle. And whole
// forwards and backwards of a model of many small units, as in training, minus those of the same
// model unsharded, divided by the number of units.
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>
#include <torch/nn/modules/container/sequential.h>

#include <chrono>
#include <iostream>

#include "base/format.h"
#include "bench/benchmarks.h"
#include "bench/flags.h"
#include "fsdp/fully_shard.h"
#include "train/device.h"

namespace fsdp::bench {
namespace {

constexpr double kGoal = 20;  // µs of our own per event

struct UnitsRow {
  Place on = {.ranks = 2};
  int units = 32;
  int64_t numel = 4096;  // per unit
  int events = 320;      // timed per kind
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(UnitsRow, on, units, numel, events)

// --- the model: a chain of units with one parameter each and as little computation as possible ---

struct LinkImpl : torch::nn::Module {
  explicit LinkImpl(int64_t numel) { weight = register_parameter("weight", at::ones({numel})); }
  at::Tensor forward(const at::Tensor& x) { return x * weight; }
  at::Tensor weight;
};
TORCH_MODULE(Link);

torch::nn::Sequential chain_of(int units, int64_t numel) {
  torch::nn::Sequential chain;
  for (int i = 0; i < units; ++i) chain->push_back(Link(numel));
  return chain;
}

// --- a rank ---

// Waits until all ranks are here and nothing is in flight.
void settle(const World& world) {
  train::synchronize(world.device());
  world.comm().barrier();
}

// Host µs of calls, and how many of them the engine spent inside communicators.
struct Costs {
  std::vector<double> host, theirs;

  // Times a call, and returns its host µs. `without`: those of the same call without the event.
  double add(const Sharded& sharded, const std::function<void()>& call, double without = 0) {
    sharded.reset_traffic();
    host.push_back(seconds_of(call) * 1e6 - without);
    theirs.push_back(
        std::chrono::duration<double, std::micro>(sharded.traffic().host_time).count());
    return host.back();
  }
};

// The medians of `costs`, minus the same call without sharding, divided by `share`.
Json line_of(const char* event, const Costs& costs, double gathers = 0, double reductions = 0,
             const Costs& without = {}, double share = 1) {
  const double call = (median(costs.host) - median(without.host)) / share;
  const double theirs = median(costs.theirs) / share;
  return {{"event", event},          {"call_us", call},
          {"all_gathers", gathers},  {"reduce_scatters", reductions},
          {"collective_us", theirs}, {"own_us", call - theirs}};
}

// Touch, gather and reshard, one unit after the other.
std::vector<Json> time_one_by_one(const UnitsRow& row, const World& world) {
  torch::NoGradGuard no_grad;
  torch::nn::Sequential chain = chain_of(row.units, row.numel);
  const auto sharded = fully_shard(chain, {.wrap = wrap::modules<Link>(),
                                           .device = world.device(),
                                           .forward_prefetch = 0,
                                           .backward_prefetch = 0});
  Costs plain, touch, ready_touch, gather, reshard;
  const int rounds = (row.events + row.units - 1) / row.units;
  for (int round = -1; round < rounds; ++round) {
    if (round == 0) plain = touch = ready_touch = gather = reshard = {};
    for (const auto& link : chain->children()) {
      Unit unit = unit_of(link);
      const auto use = [&] { link->as<Link>()->weight.sum(); };
      unit.reshard();
      settle(world);
      gather.add(sharded, [&] { unit.unshard(); });
      settle(world);
      // Without our code: a gathered unit's parameters are plain tensors.
      const double without = plain.add(sharded, use);
      settle(world);
      reshard.add(sharded, [&] { unit.reshard(); });
      settle(world);
      touch.add(sharded, use, without);
      unit.reshard();
      settle(world);
      UnshardHandle ahead = unit.unshard(/*async_op=*/true);
      settle(world);
      ready_touch.add(sharded, use, without);
      ahead.wait();
    }
  }
  sharded.reset_traffic();
  unit_of(chain->children()[0]).reshard();
  unit_of(chain->children()[0]).unshard();
  const double sent = sharded.traffic().all_gather > 0 ? 1 : 0;  // not over shared memory
  return {
      line_of("gather: unit.unshard()", gather, sent), line_of("reshard: unit.reshard()", reshard),
      line_of("touch, gathered ahead", ready_touch), line_of("touch that gathers", touch, sent)};
}

// Whole forwards and backwards of `units` units, and of the same model without sharding. `wrap`:
// empty makes the whole model one unit, which stays gathered between forward and backward.
struct Steps {
  Costs forward, backward, plain_forward, plain_backward;
  double gathers[2] = {0, 0}, reductions = 0;  // per unit; gathers of forward and of backward
};

Steps time_chain(const UnitsRow& row, const World& world, int units, const WrapPolicy& wrap,
                 int rounds) {
  torch::nn::Sequential plain = chain_of(units, row.numel), chain = chain_of(units, row.numel);
  plain->to(world.device());
  const auto sharded = fully_shard(chain, {.wrap = wrap, .device = world.device()});
  const at::Tensor x = at::ones({row.numel}, at::TensorOptions().device(world.device()));
  Steps found;
  const auto step = [&](torch::nn::Sequential& model, Costs& forwards, Costs& backwards) {
    at::Tensor loss;
    settle(world);
    forwards.add(sharded, [&] { loss = model->forward(x).sum(); });
    settle(world);
    backwards.add(sharded, [&] { loss.backward(); });
  };
  for (int round = -10; round < rounds; ++round) {
    if (round == 0) found = {};
    step(plain, found.plain_forward, found.plain_backward);
    plain->zero_grad();
    step(chain, found.forward, found.backward);
    sharded.zero_grad();
  }
  sharded.record_events(true);
  sharded.reset_traffic();
  chain->forward(x).sum().backward();
  train::synchronize(world.device());
  const bool sent = sharded.traffic().all_gather > 0;
  for (const Event& event : sharded.events()) {
    if (world.size() == 1) break;
    if (event.kind == Event::kGatherIssued && sent) found.gathers[event.backward] += 1.0 / units;
    if (event.kind == Event::kReduceIssued) found.reductions += 1.0 / units;
  }
  sharded.record_events(false);
  return found;
}

std::vector<Json> time_units(const UnitsRow& row, const World& world) {
  std::vector<Json> lines = time_one_by_one(row, world);
  const Steps one = time_chain(row, world, 1, {}, row.events);
  lines.push_back(line_of("reduce: end of a unit's backward", one.backward, 0, one.reductions,
                          one.plain_backward));
  const Steps many =
      time_chain(row, world, row.units, wrap::modules<Link>(), std::max(5, row.events / row.units));
  lines.push_back(line_of("a unit's share of forward", many.forward, many.gathers[0], 0,
                          many.plain_forward, row.units));
  lines.push_back(line_of("a unit's share of backward", many.backward, many.gathers[1],
                          many.reductions, many.plain_backward, row.units));
  return lines;
}

// --- the parent ---

int run_units(const UnitsRow& row, bool json) {
  std::vector<Json> lines = run_ours("units", row, "unit events");
  for (Json& line : lines) {
    for (const std::string count : {"all_gathers", "reduce_scatters"})
      if (line[count] == 0) line[count + "_text"] = "-";
    set(line, "own_us", line["own_us"], kGoal);
    line.update({{"goal_us", kGoal}, {"goal_us_text", formatted("<= {:.0f}", kGoal)}});
  }
  table_of({{"event", "event", kWords},
            {"call_us", "host us", 1},
            {"all_gathers", "all-gathers", 2},
            {"reduce_scatters", "reduce-scatters", 2},
            {"collective_us", "collective us", 1},
            {"own_us", "own us", 1},
            {"goal_us", "goal", kWords}},
           lines)
      .print(std::cout, json);
  if (json) return 0;
  std::cout << formatted(
      "\n{} ranks, {}, {} units of {} float32. Medians of rank 0's host time in microseconds, "
      "minus "
      "the same call\nwithout sharding. collective: time inside the communicators' calls. A unit's "
      "share of a whole forward or\nbackward includes several events: touch, gather (of the next "
      "unit), reshard, and in backward the gradient\nand its reduction.\n",
      row.on.ranks, row.on.backend, row.units, with_separators(row.numel));
  return 0;
}

}  // namespace

void add_units(CLI::App& bench, Action& action) {
  auto row = std::make_shared<UnitsRow>();
  auto json = std::make_shared<bool>(false);
  CLI::App* command =
      bench.add_subcommand("units", "Host time of a unit's events: touch, gather, reshard, reduce");
  add_place_flags(*command, row->on, /*threads=*/false);
  add_count(*command, "--units", row->units, "Units in the model", 1, 1 << 30);
  add_count(*command, "--numel", row->numel, "Elements per unit", 1, 1 << 30);
  add_count(*command, "--events", row->events, "Timed events per kind", 1, 1 << 30);
  add_json(*command, *json);
  command->footer(
      "Examples:\n  fsdp bench units\n  fsdp bench units --device cuda --ranks 1\n"
      "  fsdp bench units --ranks 4 --numel 1048576 --json");
  set_action<UnitsRow>(
      *command, action, row->on, [=] { return run_units(*row, *json); }, time_units);
}

}  // namespace fsdp::bench
