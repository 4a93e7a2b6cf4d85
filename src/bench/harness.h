// The harness of all benchmarks: rows and contenders in, JSON lines out, and reports of those
// lines.
//
// A contender is a program that prints JSON: ranks of fsdp-bench itself, which get their row as
// JSON (--worker), or a script of bench/peers. With named rows (--rows), a contender that fails or
// takes too long costs one line of the table, not the table, and a file of raw lines (--keep) lets
// an interrupted benchmark continue where it stopped.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/format.h"
#include "base/samples.h"
#include "base/table.h"
#include "bench/row.h"
#include "cli/flags.h"
#include "cli/ranks.h"
#include "fsdp/world.h"

namespace fsdp::bench {

// The benchmarks, one file each.
using AddBenchmark = void(CLI::App& bench, cli::Action& action);
AddBenchmark add_checkpoint, add_comm, add_nvme, add_offload, add_strategies, add_train, add_units,
    add_update;

using cli::Json;
using cli::rank_program;
using cli::run_ranks;
using Lines = std::vector<Json>;
using Work = std::function<void()>;

template <typename Item>
void append(std::vector<Item>& to, const std::vector<Item>& more) {
  to.insert(to.end(), more.begin(), more.end());
}

// --- ranks and peers ---

// Joins the world of `on`, runs `work` and prints on rank 0 what it returns.
int run_rank(const Machine& on, const std::function<Lines(const World&)>& work);
// Runs the ranks of one row to completion and returns what they printed.
template <typename AnyRow>
Lines run_ours(const char* benchmark, const AnyRow& row, const std::string& what) {
  return run_ranks({row.on.ranks, row.on.threads, rank_program(benchmark, row), what});
}

// A Python that has torch: FSDP_TEST_PYTHON, or python3. nullopt, with a line in the log, if it has
// none; `left_out` names what isn't measured then.
using Python = std::optional<std::string>;
Python python_with_torch(const std::string& left_out);
// The command of a script of bench/peers. `flags` are separated by spaces.
Strings peer_program(const Python& python, const std::string& script, const std::string& flags);

// --- command lines ---

struct Flags : cli::Flags {
  // With --json. `examples` end the help.
  Flags(CLI::App& bench, const char* name, const char* help, bool& json,
        const std::string& examples);

  void place(Machine& on);  // --device, --backend and --ranks

  using cli::Flags::runs;
  // The same for a benchmark whose ranks join the world of their row.
  template <typename Given, typename AnyRow>
  void runs(cli::Action& action, const std::shared_ptr<Given>& given, int (*parent)(Given),
            Lines (*rank)(const AnyRow&, const World&)) {
    cli::Flags::runs<AnyRow>(action, given, parent, [=](const AnyRow& row) {
      return run_rank(row.on, [&](const World& world) { return rank(row, world); });
    });
  }
};

// --- contenders on rows ---

struct Contender {
  std::string who;    // eager, graph, plain, …; peer
  std::string title;  // for the table
  Strings program;
  bool python = false;
  Lines rounds = {};         // the line that each round printed
  std::string failure = "";  // why a round failed; empty: none did

  bool ran() const { return !rounds.empty(); }
  double value(const char* field) const;  // the median over rounds; NaN if it is missing
  double ms() const { return value("step_ms"); }
};
using Contenders = std::vector<Contender>;

// Us, in the row's mode.
Contender ours(const char* benchmark, const Row& row, const std::string& title);
// PyTorch; `variant`: more flags of the script.
Contender theirs(const Python& python, const Row& row, const std::string& title,
                 const std::string& variant);

struct Result {
  Row row;
  Contenders all;

  Contender fastest(const std::string& who) const;  // of those that ran; without rounds: none did
};
using Results = std::vector<Result>;

// What a rank does: trains `row` and returns its measurements, with the keys of the peer.
Lines train_row(const Row& row, const World& world);

// --- reports ---

struct Report {
  std::vector<Table> tables = {};
  Strings notes = {};
  // Of the page:
  std::string heading = "";  // "Training"
  std::string suffix = "";   // of the default file: bench/results/GPU + suffix + .md
  std::string summary = "";  // Markdown, above the tables; with one, --rows all --peer writes it
};

// Prints the tables and, unless as JSON, the notes; returns 0.
int print(const Report& report, bool json);
inline int print(const std::string& columns, const Lines& lines, const Strings& notes, bool json) {
  return print({{table_of(columns, lines)}, notes}, json);
}

using ContendersOf = Contenders(const Options&, Row, const Python&);  // in the order of a round
using ReportOn = Report(const Options&, const Results&);
// Measures the contenders of all rows in turn, options.rounds times, except what --keep has. Prints
// the report, and writes its page if asked to. Warns of losses that differ from the peer's. Returns
// the exit code: 1 if one of ours failed.
int run_rows(const Options& options, const std::vector<Row>& rows, const Python& python,
             ContendersOf* contenders_of, ReportOn* report_on);

// Sets line[key], and KEY_good if there is a goal (the largest good value; 0: none).
void set(Json& line, const std::string& key, double value, double goal = 0);
// What the lines of all tables of contenders have.
Json line_of(const Result& result, const Contender& one, double goal_ms = 0, double goal_gb = 0);
constexpr const char* kApart =  // apart_percent of those lines
    "apart %: the largest difference between a step's loss and FSDP2's over all steps, relative to "
    "the first loss.";

}  // namespace fsdp::bench
