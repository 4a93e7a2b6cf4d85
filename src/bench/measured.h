// What benchmarks with named rows share: who is measured on a row, how each is run and kept, and
// the cells of the tables.
//
// A run that fails or takes too long costs one line of the table, not the table. A file of raw
// lines (--keep) holds what was measured, so that an interrupted benchmark continues where it
// stopped.
#pragma once

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "base/table.h"
#include "bench/rows.h"

namespace fsdp::bench {

// One contender on a row: us in a mode, or a variant of the peer.
struct Measured {
  std::string who;      // eager, graph, plain, …; peer
  std::string title;    // for the table
  std::string command;  // to type; the row says on how many ranks
  std::vector<std::string> program = {};
  std::vector<Json> rounds = {};  // the line that each round printed
  std::string failure = "";       // why a round failed; empty: none did

  const Json* line() const;  // of the round with the median time; null if there is none
  double value(const char* field) const;  // of that line; NaN if it has none
  std::vector<double> losses() const;     // one per step
  double ms() const { return value("step_ms"); }
};

Measured measured(std::string who, std::string title, std::vector<std::string> program);

struct RowResult {
  BenchRow row;
  std::vector<Measured> all;

  const Measured* peer() const;  // the fastest variant that ran; null if none did
  double ms_of(const std::string& who) const;
};

// How contenders are run.
struct Starts {
  std::string device;
  int threads = 1;                         // per rank
  int limit_s = 0;                         // seconds per run
  std::string keep;                        // the file; empty: none
  std::map<std::string, Json> known = {};  // what was measured, by command and round
};

// Reads what the file of --keep already has.
Starts starts(const std::string& device, int threads, int limit_s, const std::string& keep);

// Measures all of `rows` in turn, `rounds` times, except what is known. A contender that fails
// keeps the reason and isn't run again. Returns false if one of ours failed.
bool measure(Starts& starts, std::vector<RowResult>& rows, int rounds);

// The largest difference between a step's loss and the peer's, relative to the first loss. NaN if
// unknown.
double apart(const Measured& one, const Measured* peer);
constexpr const char* kApart =  // its column
    "apart %: the largest difference between a step's loss and FSDP2's over all steps, relative to "
    "the first loss.";

// Warns, and adds to `notes`, if the first or last loss differs from the peer's by more than 1 %
// (plus a little, for losses near zero).
void compare_losses(const RowResult& result, std::vector<std::string>& notes);

void append(std::vector<std::string>& to, const std::vector<std::string>& more);

// --- cells ---

Cell maybe(double value, int digits);                 // "-" for NaN
Cell against(double value, double goal, int digits);  // green up to the goal, red above; 0: none
Cell optional_cell(bool shown, const Cell& cell);     // empty unless shown

// On the page, if --peer was given.
constexpr const char* kWithoutPeer =
    "FSDP2 (--peer) is missing: there was no Python with torch (set FSDP_TEST_PYTHON to one).";

// The tables, their notes and the page.
struct Told {
  std::string device, heading;  // "Training", for the page
  std::string page;             // file; empty: bench/results/GPU + `suffix` + ".md"
  std::string suffix;
  std::vector<const Table*> tables;
  std::vector<std::string> notes;
  std::string summary = "";  // Markdown, above the tables
  bool json = false, write = false;
};
void tell(const Told& told, const std::vector<RowResult>& results);

}  // namespace fsdp::bench
