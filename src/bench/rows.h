// The rows of `fsdp bench train --rows` and `fsdp bench offload --rows`: models with a goal on a
// GPU, or with a published figure.
#pragma once

#include <string>
#include <vector>

#include "bench/workload.h"

namespace fsdp::bench {

struct BenchRow {
  std::string name;   // for --rows
  std::string title;  // for the table
  Shape shape;
  int ranks = 1;
  int steps = 20, warmup = 5;
  std::vector<std::string> modes = {"eager", "graph", "plain"};
  double goal_ms = 0;         // largest step time; 0: no goal
  double goal_gb = 0;         // largest peak memory, MiB / 1000; 0: no goal
  double goal_times = 0;      // largest step time as a multiple of the peer's; 0: no goal
  double published_rate = 0;  // tokens/s that others report, on another machine
  std::string published_by = "";
  // Where we and the peer draw the initial weights (the same ones): on the CPU, or on the device,
  // which takes seconds instead of minutes.
  bool draw_on_cpu = true;
  bool in_all = true;                // --rows all includes it
  std::string activations = "none";  // as activations.mode of fsdp train
  int keep_last = 0;                 // blocks at the end that aren't recomputed

  // --- for bench offload ---
  double clip = 1;   // norm to clip gradients to; 0: don't clip
  int prefetch = 1;  // units gathered ahead
};

std::vector<BenchRow> train_rows();
std::vector<BenchRow> offload_rows();  // two rows may share a name: with and without clipping

// `names`: "all", or names separated by commas. Throws an Error for an unknown name.
std::vector<BenchRow> rows_named(const std::string& names, const std::vector<BenchRow>& rows);

// The goal for a step, given the peer's time (NaN if unknown); 0: no goal.
double goal_ms(const BenchRow& row, double peer_ms);

}  // namespace fsdp::bench
