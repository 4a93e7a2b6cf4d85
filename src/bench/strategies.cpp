// fsdp bench strategies: memory, bytes sent and step time of each sharding strategy, on one model,
// and of what travels in fewer bits.
// Memory is that of the rank that holds most.
#include "base/log.h"
#include "bench/harness.h"

namespace fsdp::bench {
namespace {

std::vector<Row> strategy_rows(const Row& given) {
  std::vector<Row> rows;
  const auto add = [&](const char* strategy, const std::string& more = "", int reshard = 0,
                       int copies = 0) {
    Row& row = rows.emplace_back(given);
    row.title = strategy + more;
    row.strategy = strategy;
    row.reshard = reshard;
    row.copies = copies;
  };
  const bool halves = given.on.ranks % 2 == 0 && given.on.ranks > 2;
  add("FULL_SHARD");
  if (halves) add("FULL_SHARD", ", keeps 1/2", /*reshard=*/2);
  if (given.on.device == "cpu" && given.on.backend != "mpi") {
    add("FULL_SHARD", ", not shared");
    rows.back().share = false;
  }
  const auto add_wire = [&](const char* gather, const char* reduce) {
    add("FULL_SHARD", formatted(", {}", *gather ? formatted("gathers {}", gather)
                                                : formatted("reduces {}", reduce)));
    rows.back().gather = gather;
    rows.back().reduce = reduce;
  };
  add_wire("fp8", "");
  add_wire("int8", "");
  if (given.dtype == "bf16") add_wire("", "bf16");
  add_wire("", "fp8");
  add_wire("", "int8");
  add("SHARD_GRAD_OP");
  if (halves) add("HYBRID_SHARD", formatted(" 2 x {}", given.on.ranks / 2), 0, /*copies=*/2);
  add("NO_SHARD");
  if (!halves)
    log::info(
        "HYBRID_SHARD and reshard_after_forward = 2 are left out: they need an even number of "
        "ranks, at least 4.");
  return rows;
}

Contenders strategy_contenders(const Options&, Row row, const Python&) {
  return {ours("strategies", row, "fsdp.cpp")};
}

Report strategy_report(const Options& options, const Results& results) {
  Lines lines;
  for (const Result& result : results) {
    lines.push_back(result.all.front().rounds.front());
    lines.back()["strategy"] = result.row.title;
  }
  return {.tables = {table_of(
              "strategy; parameters B; gathered_from= B; gradients B; optimizer=states B; "
              "unsharded=gathered B; secondary=kept part B; reduce_buffers B; accumulated= B; "
              "total B; all_gather=all-gather B; reduce_scatter=reduce-scatter B; "
              "all_reduce=all-reduce B; step_ms .1; loss .6",
              lines)},
          .notes = notes_of(
              options.row,
              "after backward, on the rank that holds most. Collectives: bytes that a rank sends "
              "per step without\nshared memory: n (W-1) for an all-gather of n from each of W "
              "ranks and for a reduce-scatter to n, 2 n (W-1)/W\nfor an all-reduce of n.")};
}

int run_strategies(Options options) {
  return run_rows(options, strategy_rows(options.row), /*python=*/{}, strategy_contenders,
                  strategy_report);
}

}  // namespace

void add_strategies(CLI::App& bench, cli::Action& action) {
  auto options = std::make_shared<Options>();
  Row& row = options->row;
  row = kSmallRow;
  row.on.ranks = 4;
  row.clip = 0;
  row.memory = true;
  Flags flags(bench, "strategies",
              "Compare memory, bytes sent and step time of the sharding strategies", options->json,
              "  fsdp bench strategies\n"
              "  fsdp bench strategies --ranks 8 --model mlp --width 1024\n"
              "  fsdp bench strategies --dtype bf16 --json");
  add_row_flags(flags, *options);
  flags.runs(action, options, run_strategies, train_row);
}

}  // namespace fsdp::bench
