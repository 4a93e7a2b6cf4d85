// `fsdp bench train`: its options, what a rank does (train_rank.cpp), and the named rows, measured
// beside PyTorch's FSDP2 on a GPU (listed in rows.cpp, measured by train_rows.cpp and measured.cpp;
// page.cpp writes the page).
#pragma once

#include <string>
#include <vector>

#include "bench/workload.h"

namespace fsdp::bench {

struct TrainBench {
  Shape shape;
  std::string rows;            // "cpu": the two rows with a goal on the CPU; else names of rows.h
  std::string device = "cpu";  // or cuda
  std::string backend;         // empty: shm on the CPU, nccl on a GPU
  std::string strategy = "FULL_SHARD";
  int ranks = 2, threads = 1;
  int steps = 10, warmup = 3, rounds = 3;
  double clip = 1.0;  // norm to clip gradients to; 0: don't clip
  std::string only;   // ours, none, peer; empty: all
  bool json = false;
  // Not empty if this process is a rank: ours or none; for a row eager, graph, plain or tape.
  std::string worker;
  // none, selective, feed_forward, full or offload; empty: the row's own
  std::string activations;
  int keep_last = 0;  // blocks at the end that aren't recomputed
  bool keep_last_given = false, ranks_given = false;
  std::string init;  // cpu or device: where weights are drawn; empty: cpu, or the row's

  // --- for named rows ---
  // Defaults otherwise: the row's own steps, and one round.
  bool steps_given = false, warmup_given = false, rounds_given = false;
  bool peer = false;
  std::vector<std::string> modes;  // eager, graph, plain, tape; empty: the row's own
  std::string grad_dtype;          // fp32 or bf16; empty: the row's own
  bool write = false;
  std::string page;  // file to write; empty: bench/results/DEVICE.md
  std::string keep;  // file of raw lines: appended to; what it has isn't measured again
  int limit = 400;   // seconds per measurement
};

constexpr double kLearningRate = 1e-4, kBeta1 = 0.9, kBeta2 = 0.95, kWeightDecay = 0.1;

int run_rank(const TrainBench& options);
int run_rows(const TrainBench& options);

// Times a forward without and with every block recorded for recomputation.
Json time_tape(const TrainBench& options, const World& world);

}  // namespace fsdp::bench
