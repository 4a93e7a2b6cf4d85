// The rows of `fsdp bench train --rows` and `fsdp bench offload --rows`: models that have a goal on
// a GPU, or a published figure.
#pragma once

#include <string>
#include <vector>

#include "cli/bench_training.h"

namespace fsdp::cli {

struct BenchRow {
  std::string name;   // for --rows
  std::string title;  // for the table
  Shape shape;
  int ranks = 1;
  int steps = 20, warmup = 5;
  std::vector<std::string> modes = {"eager", "graph", "plain"};
  double goal_ms = 0;         // a step, at most; 0: none
  double goal_gb = 0;         // of peak memory, MiB / 1000
  double goal_times = 0;      // a step, at most this times the peer's
  double published_rate = 0;  // tokens/s that others say they reach, on another machine
  std::string published_by = "";
  // We and the peer draw the same weights, on the CPU or else on the device, which takes seconds
  // where the CPU takes minutes.
  bool draw_on_cpu = true;
  bool in_all = true;                // `all` has it
  std::string activations = "none";  // as `fsdp train` has them
  int keep_last = 0;                 // blocks at the end of which all is kept

  // --- of `bench offload` ---
  double clip = 1;   // 0: gradients are not clipped
  int prefetch = 1;  // units gathered ahead
};

std::vector<BenchRow> train_rows();
std::vector<BenchRow> offload_rows();  // two may have one name: with and without clipping

// Those of `rows` that "all" has, or names with commas between them. Error: a name that is none.
std::vector<BenchRow> rows_named(const std::string& names, const std::vector<BenchRow>& rows);

// A step, at most, given what the peer took (NaN: not known); 0: there is no goal.
double goal_ms(const BenchRow& row, double peer_ms);

}  // namespace fsdp::cli
