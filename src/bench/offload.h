// `fsdp bench offload`: its options, what a rank does (offload_rank.cpp), and the named rows,
// measured beside FSDP2's CPUOffloadPolicy (listed in rows.cpp, measured by offload_rows.cpp).
#pragma once

#include <string>
#include <vector>

#include "base/table.h"
#include "bench/step_split.h"
#include "bench/workload.h"

namespace fsdp::bench {

struct OffloadBench {
  Shape shape = {.layers = 4, .dim = 256, .heads = 4, .vocab = 2048, .seq = 64, .batch = 2};
  std::string device = "cpu", backend;
  int ranks = 1, threads = 1, steps = 10, warmup = 3, prefetch = 1;
  double clip = 1.0, fraction = 1.0;
  std::vector<std::string> which = {"off", "optimizer", "everything"};
  bool json = false;
  std::string worker;      // one of `which`, if this process is a rank
  std::string grad_dtype;  // fp32 or bf16; empty: fp32, or the row's own
  std::string init;        // cpu or device: where weights are drawn; empty: cpu, or the row's

  // --- for named rows ---
  std::string rows;
  // Defaults otherwise: the row's own; for threads, one per core.
  bool steps_given = false, warmup_given = false, prefetch_given = false, clip_given = false,
       threads_given = false;
  bool peer = false;
  std::string only;  // ours, peer; empty: both
  bool write = false;
  std::string page;  // file to write; empty: bench/results/DEVICE-offload.md
  std::string keep;  // file of raw lines: appended to; what it has isn't measured again
  int limit = 400;   // seconds per measurement
};

// The command of a rank, without the flags of the shape.
std::vector<std::string> worker_flags(const OffloadBench& options, const std::string& worker);

int run_offload_rank(const OffloadBench& options);
int run_offload_rows(const OffloadBench& options);

// How the time of a step splits into parts, one line per part, from the "parts" that a rank
// printed. `of`: the title of the row column; empty: there is only one row.
Table parts_table(const std::string& of = "");
void add_parts(Table& table, const std::string& row, const std::string& what, const Json& line);

}  // namespace fsdp::bench
