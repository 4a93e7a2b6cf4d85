// fsdp bench strategies: memory, bytes sent and step time of each sharding strategy, on one model.
// Memory is that of the rank that holds most.
#include "base/log.h"
#include "bench/benchmarks.h"
#include "bench/flags.h"

namespace fsdp::bench {
namespace {

std::vector<Row> strategy_rows(const Row& given) {
  std::vector<Row> rows;
  const auto add = [&](const char* strategy, const std::string& more = "", int reshard = 0,
                       int copies = 0) {
    rows.push_back(given);
    rows.back().title = strategy + more;
    rows.back().strategy = strategy;
    rows.back().reshard = reshard;
    rows.back().copies = copies;
  };
  const bool halves = given.on.ranks % 2 == 0 && given.on.ranks > 2;
  add("FULL_SHARD");
  if (halves) add("FULL_SHARD", ", keeps 1/2", 2);
  add("SHARD_GRAD_OP");
  if (halves)
    add("HYBRID_SHARD", " 2 x " + std::to_string(given.on.ranks / 2), 0, 2);
  else
    log::info(
        "HYBRID_SHARD and reshard_after_forward = 2 are left out: they need an even number of "
        "ranks, at least 4.");
  add("NO_SHARD");
  return rows;
}

Report strategies_report(const Row& given, const std::vector<Result>& results) {
  std::vector<Json> lines;
  for (const Result& result : results) {
    lines.push_back(result.all.front().rounds.front());
    lines.back()["strategy"] = result.row.title;
  }
  return {
      .tables = {table_of({{"strategy", "strategy", kWords},
                           {"parameters", "parameters", kBytes},
                           {"gathered_from", "", kBytes},
                           {"gradients", "gradients", kBytes},
                           {"optimizer", "states", kBytes},
                           {"unsharded", "gathered", kBytes},
                           {"secondary", "kept part", kBytes},
                           {"reduce_buffers", "reduce buffers", kBytes},
                           {"accumulated", "", kBytes},
                           {"total", "total", kBytes},
                           {"all_gather", "all-gather", kBytes},
                           {"reduce_scatter", "reduce-scatter", kBytes},
                           {"all_reduce", "all-reduce", kBytes},
                           {"step_ms", "step ms", 1},
                           {"loss", "loss", 6}},
                          lines)},
      .notes = {place_note(given),
                "Memory: after backward, on the rank that holds most. Collectives: bytes that a "
                "rank sends per step without\nshared memory: n (W-1) for an all-gather of n from "
                "each of W ranks and for a reduce-scatter to n, 2 n (W-1)/W\nfor an all-reduce "
                "of n. " +
                    time_note(given)}};
}

}  // namespace

void add_strategies(CLI::App& bench, Action& action) {
  auto options = std::make_shared<Options>();
  Row& row = options->given;
  row = small_row();
  row.on.ranks = 4;
  row.clip = 0;
  row.memory = true;
  CLI::App* command = bench.add_subcommand(
      "strategies", "Compare memory, bytes sent and step time of the sharding strategies");
  add_row_flags(*command, *options);
  command->footer(
      "Examples:\n  fsdp bench strategies\n  fsdp bench strategies --ranks 8 --model mlp --width "
      "1024\n  fsdp bench strategies --dtype bf16 --json");
  const auto parent = [options] {
    std::vector<Result> results;
    for (const Row& one : strategy_rows(options->given))
      results.push_back({one, {ours("strategies", one, "fsdp.cpp")}});
    return run_rows(*options, results, [&](const auto& measured) {
      return strategies_report(options->given, measured);
    });
  };
  set_action<Row>(*command, action, row.on, parent, train_row);
}

}  // namespace fsdp::bench
