// Flags that several benchmarks share.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "bench/harness.h"
#include "cli/commands.h"

namespace fsdp::bench {

// A whole number from `least` to `most`.
template <typename Number>
CLI::Option* add_count(CLI::App& command, const char* name, Number& value, const char* help,
                       int64_t least = 1, int64_t most = 1 << 20) {
  return command.add_option(name, value, help)
      ->check(CLI::Range(least, most).description(""))
      ->type_name("N")
      ->capture_default_str();
}

template <typename Value>
CLI::Option* add_choice(CLI::App& command, const char* name, Value& value,
                        const std::vector<std::string>& choices, const char* help) {
  return command.add_option(name, value, help)->check(CLI::IsMember(choices));
}

void add_json(CLI::App& command, bool& json);
// --device, --backend, --ranks and --threads.
void add_place_flags(CLI::App& command, Place& on, bool threads = true);

// For benchmarks of training steps: the place, the steps and the model.
void add_row_flags(CLI::App& command, Options& options);
// For those with named rows: other settings that rows have, --peer, and the page. `named` adds more
// flags to the group of named rows.
void add_named_flags(CLI::App& command, Options& options, const char* peer,
                     const std::function<void()>& named);

bool given(const Options& options, const std::string& flag);  // not for flags of the model
bool model_given(const Options& options);                     // by any of its flags
void require_rows(
    const Options& options);  // throws an Error for flags of named rows without --rows

// `row` with the flags that were given in place of its own settings, except those of the model and
// of the place.
Row with_flags(Row row, const Options& options);
// The rows of --rows with these flags, at the place of the flags, in the order of rows_named().
std::vector<Row> chosen_rows(const Options& options, const std::vector<Row>& rows);

// What the command does: `parent`, or in a rank (--worker) `rank`, with the row that it got as
// JSON. `on` and what the functions refer to must outlive the command.
template <typename AnyRow>
void set_action(CLI::App& command, cli::Action& action, Place& on,
                const std::function<int()>& parent,
                std::vector<Json> (*rank)(const AnyRow&, const World&)) {
  auto worker = std::make_shared<std::string>();
  command.add_option("--worker", *worker, "")->group("");
  command.callback([=, &action, &on] {
    if (on.backend.empty()) on.backend = on.device == "cuda" ? "nccl" : "shm";
    action = [=] {
      if (worker->empty()) return parent();
      const auto row = nlohmann::json::parse(*worker).get<AnyRow>();
      return run_rank(row.on, [&](const World& world) { return rank(row, world); });
    };
  });
}

}  // namespace fsdp::bench
