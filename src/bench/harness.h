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
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/ranks.h"
#include "fsdp/world.h"

namespace fsdp::bench {

// The benchmarks, one file each.
using AddBenchmark = void(CLI::App& bench, cli::Action& action);
AddBenchmark add_checkpoint, add_comm, add_nvme, add_offload, add_strategies, add_train, add_units,
    add_update;

using cli::Json;
using cli::run_ranks;
using Lines = std::vector<Json>;
using Strings = std::vector<std::string>;
using Work = std::function<void()>;

template <typename Item>
void append(std::vector<Item>& to, const std::vector<Item>& more) {
  to.insert(to.end(), more.begin(), more.end());
}

// --- ranks and peers ---

// Joins the world of `on`, runs `work` and prints on rank 0 what it returns.
int run_rank(const Machine& on, const std::function<Lines(const World&)>& work);
// The program of a rank that runs `row`.
Strings rank_program(const char* benchmark, const nlohmann::json& row);
// Runs the ranks of one row to completion and returns what they printed. `launcher`: instead of
// `fsdp run`.
template <typename AnyRow>
Lines run_ours(const char* benchmark, const AnyRow& row, const std::string& what,
               const Strings& launcher = {}) {
  return run_ranks({row.on.ranks, row.on.threads, rank_program(benchmark, row), what,
                    /*limit_s=*/0, launcher});
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
  std::string command() const;  // as a page shows it; the row says on how many ranks
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

// The flags of a benchmark of training steps.
struct Options {
  Row row = {};      // as flags describe it
  std::string rows;  // names; empty: the model is given by flags, too
  std::string only;  // ours, none (no FSDP) or peer; empty: all
  Strings modes;     // empty: the row's own
  int rounds = 1;
  bool json = false, peer = false;
  bool write_all = false;             // --rows all --peer writes the page, too
  std::string page;                   // file to write; empty: bench/results/GPU.md
  std::string keep;                   // file of raw lines
  int limit = 400;                    // seconds per measurement of a named row
  const CLI::App* command = nullptr;  // which flags were given
};

// A Python for named rows that stand beside the peer.
Python python_for_peer(const Options& options);
// What a rank does: trains `row` and returns its measurements, with the keys of the peer.
Lines train_row(const Row& row, const World& world);

// For benchmarks of training steps: the place, the steps and the model.
void add_row_flags(Flags& flags, Options& options);
// For named rows: other settings that rows have, --peer, and the page. The flags that follow are
// for named rows, too.
void add_named_flags(Flags& flags, Options& options, const char* peer);

bool given(const Options& options, const std::string& flag);  // not for flags of the model
bool model_given(const Options& options);                     // by any of its flags
void require_rows(const Options& options);  // throws if a flag of named rows has no --rows

// `row` with the flags that were given instead of its own settings, except those of the model, and
// at the place of the flags. A named row has its own number of ranks unless --ranks is given.
Row with_flags(const Row& row, const Options& options);

// --- reports ---

// Prints a table and notes; returns 0.
int print(const std::string& columns, const Lines& lines, const Strings& notes, bool json);

struct Report {
  std::vector<Table> tables = {};
  Strings notes = {};
  // Of the page:
  std::string heading = "";  // "Training"
  std::string suffix = "";   // of the default file: bench/results/GPU + suffix + .md
  std::string summary = "";  // Markdown, above the tables
};

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
