// The benchmarks, one file each, and what their command lines share.
#pragma once

#include <memory>

#include "base/format.h"
#include "bench/harness.h"
#include "cli/commands.h"
#include "cli/flags.h"

namespace fsdp::bench {

using AddBenchmark = void(CLI::App& bench, cli::Action& action);
AddBenchmark add_checkpoint, add_comm, add_nvme, add_offload, add_strategies, add_train, add_units,
    add_update;

struct Flags : cli::Flags {
  // With --json. `examples` end the help.
  Flags(CLI::App& bench, const char* name, const char* help, bool& json,
        const std::string& examples);

  void place(Place& on);  // --device, --backend and --ranks

  // What the command does with the flags that were given.
  template <typename Given>
  void runs(cli::Action& action, const std::shared_ptr<Given>& given, int (*work)(Given)) {
    command.callback([=, &action] { action = [=] { return work(*given); }; });
  }
  // `parent`, or in a rank (--worker) `rank`, with the row that it got as JSON. `row` is in
  // `given`.
  template <typename Given, typename AnyRow>
  void runs(cli::Action& action, const std::shared_ptr<Given>& given, AnyRow& row,
            int (*parent)(Given), Lines (*rank)(const AnyRow&, const World&)) {
    auto worker = std::make_shared<std::string>();
    command.add_option("--worker", *worker, "")->group("");
    command.callback([=, &action, &on = row.on] {
      if (on.backend.empty()) on.backend = on.device == "cuda" ? "nccl" : "shm";
      action = [=] {
        if (worker->empty()) return parent(*given);
        const auto got = nlohmann::json::parse(*worker).get<AnyRow>();
        return run_rank(got.on, [&](const World& world) { return rank(got, world); });
      };
    });
  }
};

// For benchmarks of training steps: the place, the steps and the model.
void add_row_flags(Flags& flags, Options& options);
// For named rows: other settings that rows have, --peer, and the page. The flags that follow are
// for named rows, too.
void add_named_flags(Flags& flags, Options& options, const char* peer);

bool given(const Options& options, const std::string& flag);  // not for flags of the model
bool model_given(const Options& options);                     // by any of its flags
void require_rows(const Options& options);  // throws if a flag of named rows has no --rows

// `row` with the flags that were given instead of its own settings, except those of the model and
// of the place.
Row with_flags(const Row& row, const Options& options);
// `named` with these flags, at the place of the flags.
std::vector<Row> with_flags(std::vector<Row> named, const Options& options);

}  // namespace fsdp::bench
