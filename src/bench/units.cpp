// fsdp bench units: host time of each event of a unit (touch, gather, reshard, reduce), and how
// much of it was spent inside the collective's call. The rest is ours.
//
// Measured in two ways. One event at a time: the difference between a call with the event and the
// same call without; prefetching is off, ranks start together, and a GPU is idle. And whole
// forwards and backwards of a model of many small units, as in training, minus those of the same
// model unsharded, divided by the number of units. The last row is a part of every collective's
// call: its record in the flight recorder.
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>
#include <torch/nn/modules/container/sequential.h>

#include "bench/harness.h"
#include "comm/core/flight_recorder.h"
#include "fsdp/fully_shard.h"
#include "train/device.h"

namespace fsdp::bench {
namespace {

constexpr double kGoal = 20;  // µs of our own per event

struct UnitsRow {
  Machine on = {.ranks = 2};
  int units = 32;
  int64_t numel = 4096;  // per unit
  int events = 320;      // timed per kind
  bool json = false;     // for the parent only
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(UnitsRow, on, units, numel, events)

// A unit with one parameter and as little computation as possible.
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

// Host µs of calls by name, how many of them the engine spent inside communicators ("NAME inside"),
// and whether it sent an all-gather ("NAME sent").
struct Costs {
  const World& world;
  Sharded sharded;
  Samples us = {};
  double gathers[2] = {0, 0}, reductions = 0;  // collectives per unit, in forward and backward

  // Waits until all ranks are here and nothing is in flight.
  void settle() const {
    train::synchronize(world.device());
    world.comm().barrier();
  }

  // Returns the call's µs. `without`: those of the same call without the event.
  double time(const std::string& name, const Work& call, double without = 0) {
    settle();
    sharded.reset_traffic();
    const double host = seconds_of(call) * 1e6;
    us.add(name, host - without);
    const Traffic traffic = sharded.traffic();
    us.add(name + " inside", static_cast<double>(traffic.host_time.count()) / 1e3);
    us.add(name + " sent", traffic.all_gather > 0 ? 1 : 0);  // not over shared memory
    return host;
  }

  // The medians of calls `name`, minus those of `plain`, divided by `share`.
  Json line(const char* event, const std::string& name, double gathered = 0, double reduced = 0,
            const std::string& plain = "", double share = 1) {
    const double call = (us.median(name) - us.median(plain)) / share;
    const double inside = us.median(name + " inside") / share;
    return {{"event", event},          {"call_us", call},
            {"all_gathers", gathered}, {"reduce_scatters", reduced},
            {"collective_us", inside}, {"own_us", call - inside}};
  }
};

// Touch, gather and reshard, one unit after the other.
Lines time_one_by_one(const UnitsRow& row, const World& world) {
  torch::NoGradGuard no_grad;
  torch::nn::Sequential chain = chain_of(row.units, row.numel);
  Costs costs{world, fully_shard(chain, {.wrap = wrap::modules<Link>(),
                                         .device = world.device(),
                                         .forward_prefetch = 0,
                                         .backward_prefetch = 0})};
  const int rounds = (row.events + row.units - 1) / row.units;
  for (int round = -1; round < rounds; ++round) {  // the first is warm-up
    if (round == 0) costs.us = {};
    for (const auto& link : chain->children()) {
      Unit unit = unit_of(link);
      const auto use = [&] { link->as<Link>()->weight.sum(); };
      unit.reshard();
      costs.time("gather", [&] { unit.unshard(); });
      const double plain = costs.time("plain", use);  // gathered parameters are plain tensors
      costs.time("reshard", [&] { unit.reshard(); });
      costs.time("touch", use, plain);
      unit.reshard();
      costs.settle();
      UnshardHandle ahead = unit.unshard(/*async_op=*/true);
      costs.time("touch, ready", use, plain);
      ahead.wait();
    }
  }
  return {costs.line("gather: unit.unshard()", "gather", costs.us.median("gather sent")),
          costs.line("reshard: unit.reshard()", "reshard"),
          costs.line("touch, gathered ahead", "touch, ready"),
          costs.line("touch that gathers", "touch", costs.us.median("touch sent"))};
}

// Whole forwards and backwards of `units` units, and of the same model without sharding. `wrap`:
// empty makes the whole model one unit, which stays gathered between forward and backward.
Costs time_chain(const UnitsRow& row, const World& world, int units, const WrapPolicy& wrap,
                 int rounds) {
  torch::nn::Sequential plain = chain_of(units, row.numel), chain = chain_of(units, row.numel);
  plain->to(world.device());
  Costs costs{world, fully_shard(chain, {.wrap = wrap, .device = world.device()})};
  const at::Tensor x = at::ones({row.numel}, at::TensorOptions().device(world.device()));
  const auto step = [&](torch::nn::Sequential& model, const std::string& prefix) {
    at::Tensor loss;
    costs.time(prefix + "forward", [&] { loss = model->forward(x).sum(); });
    costs.time(prefix + "backward", [&] { loss.backward(); });
  };
  for (int round = -10; round < rounds; ++round) {
    if (round == 0) costs.us = {};
    step(plain, "plain ");
    plain->zero_grad();
    step(chain, "");
    costs.sharded.zero_grad();
  }
  costs.sharded.record_events(true);
  costs.sharded.reset_traffic();
  chain->forward(x).sum().backward();
  train::synchronize(world.device());
  const bool sent = costs.sharded.traffic().all_gather > 0;
  for (const Event& event : costs.sharded.events()) {
    if (world.size() == 1) break;
    if (event.kind == Event::kGatherIssued && sent) costs.gathers[event.backward] += 1.0 / units;
    if (event.kind == Event::kReduceIssued) costs.reductions += 1.0 / units;
  }
  return costs;
}

// The records of a call that is issued, begun and finished.
Json time_record(const UnitsRow& row, const World& world) {
  constexpr int kCalls = 1000;
  comm::flight::Group* group = comm::flight::add_group("bench", "none", {world.rank()});
  const auto what = comm::describe(comm::Operation::kAllGather, at::kFloat, row.numel);
  Samples us;
  for (int i = 0; i < row.events; ++i) {
    const double all = seconds_of([&] {
      for (int call = 0; call < kCalls; ++call) {
        const uint64_t number = comm::flight::issued(
            group, what, comm::flight::amounts_of(what, world.size()), world.timeout());
        comm::flight::started(number);
        comm::flight::finished(number);
      }
    });
    us.add("record", all / kCalls * 1e6);
  }
  const double each = us.median("record");
  return {{"event", "a collective's record"},
          {"call_us", each},
          {"all_gathers", 0},
          {"reduce_scatters", 0},
          {"collective_us", 0.0},
          {"own_us", each}};
}

Lines time_units(const UnitsRow& row, const World& world) {
  Lines lines = time_one_by_one(row, world);
  Costs one = time_chain(row, world, 1, {}, row.events);
  lines.push_back(one.line("reduce: end of a unit's backward", "backward", 0, one.reductions,
                           "plain backward"));
  Costs many =
      time_chain(row, world, row.units, wrap::modules<Link>(), std::max(5, row.events / row.units));
  lines.push_back(many.line("a unit's share of forward", "forward", many.gathers[0], 0,
                            "plain forward", row.units));
  lines.push_back(many.line("a unit's share of backward", "backward", many.gathers[1],
                            many.reductions, "plain backward", row.units));
  lines.push_back(time_record(row, world));
  return lines;
}

int run_units(UnitsRow row) {
  Lines lines = run_ours("units", row, "unit events");
  for (Json& line : lines) {
    for (const std::string count : {"all_gathers", "reduce_scatters"})
      if (line[count] == 0) line[count + "_text"] = "-";
    set(line, "own_us", line["own_us"], kGoal);
    line.update({{"goal_us", kGoal}, {"goal_us_text", formatted("<= {:.0f}", kGoal)}});
  }
  return print(
      "event; call_us=host us .1; all_gathers=all-gathers .2; reduce_scatters=reduce-scatters .2; "
      "collective_us .1; own_us .1; goal_us=goal",
      lines,
      {formatted(
          "{} ranks, {}, {} units of {} float32. Medians of rank 0's host time in "
          "microseconds, minus the same call\nwithout sharding. collective: time inside the "
          "communicators' calls. A unit's share of a whole forward or\nbackward includes "
          "several events: touch, gather (of the next unit), reshard, and in backward the "
          "gradient\nand its reduction. A collective's record: what the flight recorder adds to "
          "each call.",
          row.on.ranks, row.on.backend, row.units, with_separators(row.numel))},
      row.json);
}

}  // namespace

void add_units(CLI::App& bench, cli::Action& action) {
  auto row = std::make_shared<UnitsRow>();
  Flags flags(bench, "units", "Host time of a unit's events: touch, gather, reshard, reduce",
              row->json,
              "  fsdp bench units\n  fsdp bench units --device cuda --ranks 1\n"
              "  fsdp bench units --ranks 4 --numel 1048576 --json");
  flags.place(row->on);
  flags.number("--units", row->units, "Units in the model");
  flags.number("--numel", row->numel, "Elements per unit");
  flags.number("--events", row->events, "Timed events per kind");
  flags.runs(action, row, run_units, time_units);
}

}  // namespace fsdp::bench
