// The parts of `fsdp bench offload`: its options, what a rank does (bench_offload_rank.cpp), and
// the named rows that are measured beside FSDP2's CPUOffloadPolicy (bench_rows.cpp says which,
// bench_offload_rows.cpp measures them).
#pragma once

#include <string>
#include <vector>

#include "base/table.h"
#include "cli/bench_training.h"
#include "cli/step_split.h"

namespace fsdp::cli {

struct OffloadBench {
  Shape shape = {.layers = 4, .dim = 256, .heads = 4, .vocab = 2048, .seq = 64, .batch = 2};
  std::string device = "cpu", backend;
  int ranks = 1, threads = 1, steps = 10, warmup = 3, prefetch = 1;
  double clip = 1.0, fraction = 1.0;
  std::vector<std::string> which = {"off", "optimizer", "everything"};
  bool json = false;
  std::string worker;      // one of `which`: this process is a rank
  std::string grad_dtype;  // fp32 or bf16; empty: fp32, or what the row asks for
  std::string init;        // cpu or device: where weights are drawn; empty: cpu, or the row's

  // --- for named rows ---
  std::string rows;
  // Else each row has its own, and threads are as many as the machine has cores.
  bool steps_given = false, warmup_given = false, prefetch_given = false, clip_given = false,
       threads_given = false;
  bool peer = false;
  std::string only;  // ours, peer; empty: both
  bool write = false;
  std::string page;  // where to write; empty: bench/results/DEVICE-offload.md
  std::string keep;  // a file of what was measured: added to, and not measured again
  int limit = 400;   // seconds that one start may take
};

// What a rank runs, but for the shape and what is offloaded.
std::vector<std::string> worker_flags(const OffloadBench& options, const std::string& worker);

int run_offload_rank(const OffloadBench& options);
int run_offload_rows(const OffloadBench& options);

// Where the time of a step goes, a line for each part: from the "parts" that a rank has printed.
// `of`: how people read the column of rows; empty: there is one row, and they do not.
Table parts_table(const std::string& of = "");
void add_parts(Table& table, const std::string& row, const std::string& what, const Json& line);

}  // namespace fsdp::cli
