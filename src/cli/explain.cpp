// fsdp explain: takes a training step of a toy model on a few ranks and explains what the engine
// did, event by event. The command launches its own ranks, which run it again with --worker.
#include <algorithm>
#include <iostream>

#include "base/exit_code.h"
#include "base/format.h"
#include "cli/commands.h"
#include "cli/explain.h"
#include "cli/flags.h"
#include "fsdp/error.h"

namespace fsdp::cli {
namespace {

int run_worker(const ExplainOptions& options) {
  // One write per rank, so that lines of different ranks don't mix.
  std::cout << account_of_a_step(options).dump() + "\n" << std::flush;
  return 0;
}

int run_parent(ExplainOptions options) {
  if (options.strategy == "HYBRID_SHARD" && (options.ranks < 4 || options.ranks % 2 != 0))
    throw CodedError(
        kExitUsage,
        "HYBRID_SHARD keeps two copies of the model, each sharded over at least two ranks.",
        "give --ranks 4, 6 or 8.");
  std::vector<Json> accounts =
      run_ranks({options.ranks, 1, rank_program("explain", options), "explain"});
  std::sort(accounts.begin(), accounts.end(), [](const Json& a, const Json& b) {
    return a["rank"].get<int>() < b["rank"].get<int>();
  });
  if (static_cast<int>(accounts.size()) != options.ranks)
    throw Error(formatted("only {} of {} ranks reported.", accounts.size(), options.ranks),
                "their own errors are above.");
  if (!options.html.empty()) {
    report::write_page(explain_page(accounts), options.html);
    std::cout << options.html << "\n";
  } else if (options.json) {
    for (const Json& account : accounts) std::cout << account.dump() << "\n";
  } else {
    tell(accounts, options.brief, std::cout);
  }
  return 0;
}

}  // namespace

void add_explain(CLI::App& app, Action& action) {
  auto options = std::make_shared<ExplainOptions>();
  Flags flags(app, "explain",
              "Take one sharded training step of a toy model and explain every event",
              "Examples:\n  fsdp explain\n  fsdp explain --strategy SHARD_GRAD_OP\n"
              "  fsdp explain --ranks 4 --prefetch 0 --brief\n  fsdp explain --html step.html");
  flags.number("--ranks", options->ranks, "Ranks on this host, 1 to 8", 1, 8);
  flags
      .any("--strategy", options->strategy, "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD or HYBRID_SHARD",
           "S")
      ->transform(CLI::IsMember({"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"},
                                CLI::ignore_case)
                      .description(""));
  flags.number("--prefetch", options->prefetch, "Units to gather ahead: 0 or 1", 0, 1);
  flags.any("--model", options->model, "mlp or llama-tiny", "M")
      ->check(CLI::IsMember({"mlp", "llama-tiny"}).description(""));
  flags.number("--blocks", options->blocks, "Blocks in the model, 1 to 16", 1, 16);
  flags.flag("--shared", options->shared,
             "Share shards in host memory, as ranks of one host do by default, instead of sending "
             "them");
  flags.flag("--brief", options->brief, "Numbers only, no explanations");
  flags.flag("--json", options->json, "The measurements, one JSON object per rank");
  flags.any("--html", options->html, "Write the step as a page for a browser instead", "FILE");
  flags.runs<ExplainOptions>(action, options, run_parent, run_worker);
}

}  // namespace fsdp::cli
