// The harness of all benchmarks: rows and contenders in, JSON lines out, tables of those lines.
//
// A contender is a program that prints JSON: ranks of fsdp-bench itself, which get their row as
// JSON (--worker), or a script of bench/peers. With named rows (--rows), a contender that fails or
// takes too long costs one line of the table, not the table, and a file of raw lines (--keep) lets
// an interrupted benchmark continue where it stopped.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/subprocess.h"
#include "base/table.h"
#include "bench/row.h"
#include "cli/ranks.h"
#include "fsdp/world.h"

namespace CLI {
class App;
}

namespace fsdp::bench {

using cli::Json;
using cli::run_ranks;

// --- running ---

// Joins the world of `on`, runs `work` and prints on rank 0 what it returns.
int run_rank(const Place& on, const std::function<std::vector<Json>(const World&)>& work);

// The program of a rank that runs `row`.
std::vector<std::string> rank_program(const char* benchmark, const nlohmann::json& row);

// Runs the ranks of one row to completion and returns what they printed.
template <typename AnyRow>
std::vector<Json> run_ours(const char* benchmark, const AnyRow& row, const std::string& what) {
  return run_ranks({row.on.ranks, row.on.threads, rank_program(benchmark, row), what});
}

// A Python that has torch: FSDP_TEST_PYTHON, or python3. nullopt, with a line in the log, if it has
// none; `left_out` names what isn't measured then.
std::optional<std::string> python_with_torch(const std::string& left_out);

// The command of a script of bench/peers, in the source tree or beside an installed binary.
std::vector<std::string> peer_program(const std::string& python, const std::string& script,
                                      const std::vector<std::string>& flags);

double seconds_since(std::chrono::steady_clock::time_point start);
double seconds_of(const std::function<void()>& work);
double median(std::vector<double> values);  // 0 if there are none

// Values of several rounds by name, and their medians.
struct Samples {
  std::map<std::string, std::vector<double>> all;

  void add(const std::string& name, double value) { all[name].push_back(value); }
  double median(const std::string& name) const;
  void fill(Json& line) const;  // a field for each name
};

// --- rows and contenders ---

// The flags of a benchmark of training steps.
struct Options {
  Row given = {};                  // by flags
  std::string rows;                // names; empty: the model is given by flags, too
  std::string only;                // ours, none (no FSDP) or peer; empty: all
  std::vector<std::string> modes;  // empty: the row's own
  int rounds = 1;
  bool json = false, peer = false;
  bool write_all = false;             // --rows all --peer writes the page, too
  std::string page;                   // file to write; empty: bench/results/GPU.md
  std::string keep;                   // file of raw lines
  int limit = 400;                    // seconds per measurement of a named row
  const CLI::App* command = nullptr;  // which flags were given
};

struct Contender {
  std::string who;    // eager, graph, plain, …; peer
  std::string title;  // for the table
  std::vector<std::string> program;
  bool python = false;
  std::vector<Json> rounds = {};  // the line that each round printed
  std::string failure = "";       // why a round failed; empty: none did

  double value(const char* field) const;  // the median over rounds; NaN if it is missing
  double ms() const { return value("step_ms"); }
  std::string command() const;  // as a page shows it; the row says on how many ranks
};

// Us, in the row's mode.
Contender ours(const char* benchmark, const Row& row, const std::string& title);
// PyTorch; `variant`: more flags of the script.
Contender theirs(const std::string& python, const Row& row, const std::string& title,
                 const std::vector<std::string>& variant);

struct Result {
  Row row;
  std::vector<Contender> all = {};

  const Contender* find(const std::string& who) const;  // null if there is none
  const Contender* peer() const;               // the fastest variant that ran; null if none did
  double ms_of(const std::string& who) const;  // NaN if it didn't run
  double peer_ms() const;
};

// A Python for named rows that stand beside the peer.
std::optional<std::string> python_for_peer(const Options& options);

// Measures everything in turn, options.rounds times, except what --keep has. Returns false if one
// of ours failed.
bool measure(const Options& options, std::vector<Result>& results);

// --- tables ---

// Sets line[key], and KEY_good if there is a goal (the largest good value; 0: none).
void set(Json& line, const std::string& key, double value, double goal = 0);

// What the lines of all named rows have, and its columns. The columns of one benchmark stand before
// tokens/s, after it, and after the peak memory.
Json named_line(const Result& result, const Contender& one, bool ours, double goal_ms,
                double peak_gb, double goal_gb);
std::vector<LineColumn> named_columns(int digits, const std::vector<LineColumn>& before_tokens,
                                      const std::vector<LineColumn>& after_tokens,
                                      const std::vector<LineColumn>& after_memory);

// --- reports ---

constexpr const char* kApart =  // the last of those columns
    "apart %: the largest difference between a step's loss and FSDP2's over all steps, relative to "
    "the first loss.";

// Of models given by flags: "Llama 13.8M: 6 layers, …; 2 ranks x 1 threads, shm", and how steps
// were timed.
std::string place_note(const Row& row);
std::string time_note(const Row& row);

struct Report {
  std::vector<Table> tables = {};
  std::vector<std::string> notes = {};
  // Of the page:
  std::string heading = "";  // "Training"
  std::string suffix = "";   // of the default file: bench/results/GPU + suffix + .md
  std::string summary = "";  // Markdown, above the tables
};

// Measures everything, prints the report, and writes its page if asked to. Warns of losses that
// differ from the peer's. Returns the exit code.
int run_rows(const Options& options, std::vector<Result> results,
             const std::function<Report(const std::vector<Result>& results)>& report_on);

}  // namespace fsdp::bench
