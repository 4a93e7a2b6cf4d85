// fsdp explain: takes a training step of a toy model on a few ranks and explains what the engine
// did, event by event. The command launches its own ranks, which run it again with --worker.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>

#include "base/format.h"
#include "base/subprocess.h"
#include "cli/commands.h"
#include "cli/explain.h"
#include "fsdp/error.h"

namespace fsdp::cli {
namespace {

int run_worker(const ExplainOptions& options) {
  // One write per rank, so that lines of different ranks don't mix.
  std::cout << account_of_a_step(options).dump() + "\n" << std::flush;
  return 0;
}

int run_parent(const ExplainOptions& options) {
  if (options.strategy == "HYBRID_SHARD" && (options.ranks < 4 || options.ranks % 2 != 0))
    throw Error("HYBRID_SHARD keeps two copies of the model, each sharded over at least two ranks.",
                "give --ranks 4, 6 or 8.");
  std::vector<std::string> program = {own_binary(), "explain", "--worker"};
  auto flag = [&](const char* name, const std::string& value) {
    program.push_back(name);
    program.push_back(value);
  };
  flag("--strategy", options.strategy);
  flag("--prefetch", std::to_string(options.prefetch));
  flag("--model", options.model);
  flag("--blocks", std::to_string(options.blocks));
  if (options.shared) program.push_back("--shared");
  std::vector<Json> accounts = run_ranks({options.ranks, 1, program, "explain"});
  std::sort(accounts.begin(), accounts.end(), [](const Json& a, const Json& b) {
    return a["rank"].get<int>() < b["rank"].get<int>();
  });
  if (static_cast<int>(accounts.size()) != options.ranks)
    throw Error(formatted("only {} of {} ranks reported.", accounts.size(), options.ranks),
                "their own errors are above.");
  if (options.json) {
    for (const Json& account : accounts) std::cout << account.dump() << "\n";
  } else {
    tell(accounts, options.brief, std::cout);
  }
  return 0;
}

}  // namespace

void add_explain(CLI::App& app, Action& action) {
  auto options = std::make_shared<ExplainOptions>();
  CLI::App* command = app.add_subcommand(
      "explain", "Take one sharded training step of a toy model and explain every event");
  command->add_option("--ranks", options->ranks, "Ranks on this host, 1 to 8")
      ->check(CLI::Range(1, 8).description(""))
      ->type_name("N")
      ->capture_default_str();
  command
      ->add_option("--strategy", options->strategy,
                   "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD or HYBRID_SHARD")
      ->transform(CLI::IsMember({"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"},
                                CLI::ignore_case)
                      .description(""))
      ->type_name("S")
      ->capture_default_str();
  command->add_option("--prefetch", options->prefetch, "Units to gather ahead: 0 or 1")
      ->check(CLI::Range(0, 1).description(""))
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--model", options->model, "mlp or llama-tiny")
      ->check(CLI::IsMember({"mlp", "llama-tiny"}).description(""))
      ->type_name("M")
      ->capture_default_str();
  command->add_option("--blocks", options->blocks, "Blocks in the model, 1 to 16")
      ->check(CLI::Range(1, 16).description(""))
      ->type_name("N")
      ->capture_default_str();
  command->add_flag("--shared", options->shared,
                    "Share shards in host memory, as ranks of one host do by default, instead of "
                    "sending them");
  command->add_flag("--brief", options->brief, "Numbers only, no explanations");
  command->add_flag("--json", options->json, "The measurements, one JSON object per rank");
  command->add_flag("--worker", options->worker, "")->group("");  // a rank of the above
  command->footer(
      "Examples:\n  fsdp explain\n  fsdp explain --strategy SHARD_GRAD_OP\n"
      "  fsdp explain --ranks 4 --prefetch 0 --brief");
  command->callback([options, &action] {
    action = [options] { return options->worker ? run_worker(*options) : run_parent(*options); };
  });
}

}  // namespace fsdp::cli
