// The parts of `fsdp bench train`: its options, what a rank does (bench_train_rank.cpp), and the
// named rows that are measured beside PyTorch's FSDP2 on a GPU (bench_rows.cpp says which,
// bench_train_rows.cpp and bench_measured.cpp measure them, bench_page.cpp writes the page).
#pragma once

#include <string>
#include <vector>

#include "cli/bench_training.h"

namespace fsdp::cli {

struct TrainBench {
  Shape shape;
  std::string rows;  // "cpu": both rows that have a goal there; else names of bench_rows.h
  std::string device = "cpu";  // or cuda
  std::string backend;         // empty: shm on the CPU, nccl on a GPU
  std::string strategy = "FULL_SHARD";
  int ranks = 2, threads = 1;
  int steps = 10, warmup = 3, rounds = 3;
  double clip = 1.0;  // 0: none
  std::string only;   // ours, none, peer; empty: all
  bool json = false;
  // ours, none: this process is a rank. Of a row: eager, graph, plain, tape.
  std::string worker;
  // none, selective, feed_forward, full, offload; empty: what the row asks for
  std::string activations;
  int keep_last = 0;  // blocks at the end of which all is kept
  bool keep_last_given = false, ranks_given = false;
  std::string init;  // cpu or device: where weights are drawn; empty: cpu, or the row's

  // --- for named rows ---
  // Else each row has its own steps, and one round.
  bool steps_given = false, warmup_given = false, rounds_given = false;
  bool peer = false;
  std::vector<std::string> modes;  // eager, graph, plain, tape; empty: what the row asks for
  std::string grad_dtype;          // fp32 or bf16; empty: what the row asks for
  bool write = false;
  std::string page;  // where to write; empty: bench/results/DEVICE.md
  std::string keep;  // a file of what was measured: added to, and not measured again
  int limit = 400;   // seconds that one start may take
};

constexpr double kLearningRate = 1e-4, kBeta1 = 0.9, kBeta2 = 0.95, kWeightDecay = 0.1;

int run_rank(const TrainBench& options);
int run_rows(const TrainBench& options);

// What recording costs: a forward without and with every block recorded for recomputation.
Json time_tape(const TrainBench& options, const World& world);

}  // namespace fsdp::cli
