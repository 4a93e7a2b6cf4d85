// What benchmarks with named rows have in common: who is measured on a row, how each is started and
// kept, and the cells of the tables that tell it.
//
// One start that fails or takes too long costs its own line of the table, not the table. A file of
// raw lines (--keep) holds what was measured, so that a run that was cut short goes on where it
// ended.
#pragma once

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "base/table.h"
#include "cli/bench_rows.h"

namespace fsdp::cli {

// Somebody on one row: us in a mode, or a variant of the peer.
struct Measured {
  std::string who;      // eager, graph, plain, …; peer
  std::string title;    // for the table
  std::string command;  // that can be typed, with $RANKS processes of it
  std::vector<std::string> program = {};
  std::vector<Json> rounds = {};  // what each printed
  std::string failure = "";       // where a round did not end well

  const Json* line() const;               // of the round with the median time; null: none
  double value(const char* field) const;  // in it; NaN where there is none
  std::vector<double> losses() const;     // of its steps
  double ms() const { return value("step_ms"); }
};

Measured measured(std::string who, std::string title, std::vector<std::string> program);

struct RowResult {
  BenchRow row;
  std::vector<Measured> all;

  const Measured* peer() const;  // its faster variant that ran; null: none
  double ms_of(const std::string& who) const;
};

// How they are started.
struct Starts {
  std::string device;
  int threads = 1;                         // each
  int limit_s = 0;                         // seconds that one may take
  std::string keep;                        // the file; empty: none
  std::map<std::string, Json> known = {};  // what was measured, by its command and round
};

// With what the file of --keep knows.
Starts starts(const std::string& device, int threads, int limit_s, const std::string& keep);

// Measures all of `rows` in turn, as often as `rounds` says, unless it is known. What fails keeps
// its reason and is not started again. False where one of ours failed.
bool measure(Starts& starts, std::vector<RowResult>& rows, int rounds);

// The most that a step's loss is apart from the peer's, as a part of the first one: how near the
// two curves are. NaN: not known.
double apart(const Measured& one, const Measured* peer);
constexpr const char* kApart =  // its column
    "apart %: the most that the loss of a step, of all that were taken, is away from FSDP2's, as a "
    "part of the first one.";

// Losses that are more than 1 % apart from the peer's, at the beginning or at the end (and a bit,
// where nothing is left of them): warned of, and added to `notes`.
void compare_losses(const RowResult& result, std::vector<std::string>& notes);

void append(std::vector<std::string>& to, const std::vector<std::string>& more);

// --- cells ---

Cell maybe(double value, int digits);                 // "-" for NaN
Cell against(double value, double goal, int digits);  // green up to the goal, red above; 0: none
Cell optional_cell(bool shown, const Cell& cell);     // nothing unless shown

// A page must not look as if nobody had asked.
constexpr const char* kWithoutPeer =
    "FSDP2 was asked for and is not here: there was no python with torch (FSDP_TEST_PYTHON names "
    "one).";

// The table, its notes, and, where it is wanted, the page.
struct Told {
  std::string device, heading;  // "Training", for the page
  std::string page;             // where; empty: bench/results/GPU + `suffix` + ".md"
  std::string suffix;
  std::vector<const Table*> tables;
  std::vector<std::string> notes;
  std::string summary = "";  // Markdown, above the tables
  bool json = false, write = false;
};
void tell(const Told& told, const std::vector<RowResult>& results);

}  // namespace fsdp::cli
