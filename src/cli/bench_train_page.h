// What `fsdp bench train --rows` measured, and the page that tells it.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "cli/bench_rows.h"
#include "cli/bench_train.h"

namespace fsdp::cli {

// Somebody on one row: us in a mode, or a variant of the peer.
struct Measured {
  std::string who;      // eager, graph, plain, peer
  std::string title;    // for the table
  std::string command;  // that can be typed, with $RANKS processes of it
  std::vector<std::string> program = {};
  std::vector<Json> rounds = {};  // what each printed
  std::string failure = "";       // where a round did not end well

  // Of the round with the median time; NaN where there is none.
  double value(const char* field) const;
  double ms() const { return value("step_ms"); }
};

struct RowResult {
  BenchRow row;
  std::vector<Measured> all;

  const Measured* peer() const;  // its faster variant that ran; null: none
  double ms_of(const std::string& who) const;
};

// A page of Markdown: machine, versions, commands, `table`, `notes` and every raw line.
std::string page_of(const TrainBench& options, const std::vector<RowResult>& results,
                    const std::string& table, const std::vector<std::string>& notes);

// Where it goes when no file is named: bench/results/h200.md for an "NVIDIA H200".
std::string page_path(const std::vector<RowResult>& results);

}  // namespace fsdp::cli
