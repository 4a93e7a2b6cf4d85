// Warnings about a run. Each has a name, what was observed, and what to do; docs/warnings.md has a
// section for every name. advice() is a pure function of plain facts, so each warning can be
// tested. A run shows each one once, and log.silence turns it off.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "shard/config.h"

namespace fsdp::observe {

// A rank's average step since the ranks were last compared.
struct RankSpeed {
  std::string host;
  double step_ms = 0;
  double wait_ms = 0;  // of it, waiting for other ranks
};

struct UnitSize {
  std::string name;
  int64_t bytes = 0;  // of all its parameters, gathered
};

// Unknown facts keep their defaults and cause no warning.
struct RunFacts {
  // The machine and how ranks were launched.
  int world = 1;
  int ranks_on_host = 1;
  int cores = 0;  // available to all ranks of this host
  bool gpu = false;
  std::string backend;             // of the communicator: shm, mpi, nccl
  bool torchrun = false;           // TORCHELASTIC_RUN_ID is set
  std::optional<int> omp_threads;  // OMP_NUM_THREADS

  // The config.
  shard::Precision precision = shard::Precision::kFp32;  // of parameters in operators
  shard::Reduce reduce = shard::Reduce::kFp32;
  int replicas = 1;  // copies of the model, whose gradients are summed in the dtype of `reduce`
  bool grad_scaler = false;
  std::optional<double> clip;  // 0: none
  int64_t micro_batch = 0;
  int64_t accumulation = 1;  // micro-batches per rank and step
  std::vector<UnitSize> units;

  // Measurements of the latest steps; the first steps of a run are left out.
  int64_t steps = 0;
  double step_s = 0;  // sums over these steps
  double exposed_comm_s = 0;
  double data_s = 0;
  int64_t skipped = 0;                         // steps whose loss or gradient wasn't finite
  std::vector<double> losses;                  // of the latest steps, oldest first
  std::optional<double> memory_share;          // peak so far, as a share of the device's memory
  int64_t allocator_retries = 0;               // since the first steps of the run
  std::vector<std::vector<RankSpeed>> speeds;  // of all ranks, at the latest comparisons
  std::vector<int64_t> expert_idle_steps;  // of each expert: the latest steps that sent it no token
};

struct Advice {
  std::string name;
  std::string text;  // what was observed
  std::string hint;  // what to do
};

// All warnings that the facts give reason for, in a fixed order.
std::vector<Advice> advice(const RunFacts& facts);

const std::vector<std::string>& advice_names();

// Returns each warning once.
class Adviser {
 public:
  // `silenced` are names; an unknown name is an Error.
  explicit Adviser(const std::vector<std::string>& silenced = {});
  std::vector<Advice> news(const RunFacts& facts);

 private:
  std::set<std::string> known_;
};

// Two lines: "warning: small-units: …" and the hint.
std::string describe(const Advice& advice);

}  // namespace fsdp::observe
