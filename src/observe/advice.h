// Warnings about a run, each with a name, what was seen, and what to do; docs/warnings.md has a
// chapter for every name. A pure function of plain facts, so that each can be tested; a run gives
// each of them once, and log.silence switches one off.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace fsdp::observe {

struct UnitSize {
  std::string name;
  int64_t bytes = 0;  // of all its parameters, gathered
};

// What is not known stays as it is here, and gives no warning.
struct RunFacts {
  // The machine and how ranks were started.
  int world = 1;
  int ranks_on_host = 1;
  int cores = 0;  // that this host's ranks may use together
  bool gpu = false;
  bool torchrun = false;           // TORCHELASTIC_RUN_ID is set
  std::optional<int> omp_threads;  // OMP_NUM_THREADS

  // What was chosen.
  std::string precision = "fp32";  // of parameters in operators
  std::string reduce = "fp32";     // of gradients on their way
  int reduce_ranks = 1;            // that a gradient is summed over
  bool grad_scaler = false;
  std::optional<double> clip;  // 0: none
  int64_t micro_batch = 0;
  int64_t accumulation = 1;  // micro-batches in a step
  std::vector<UnitSize> units;

  // What was measured: the last steps, the first ones of a run left out.
  int64_t steps = 0;
  double step_s = 0;  // sums over these steps
  double exposed_comm_s = 0;
  double data_s = 0;
  int64_t skipped = 0;                 // of these steps: loss or gradient was not finite
  std::vector<double> losses;          // of the last steps, oldest first; ends with the newest
  std::optional<double> memory_share;  // of the device's memory, at the most so far
};

struct Advice {
  std::string name;
  std::string text;  // what was seen
  std::string hint;  // what to do
};

// Everything that the facts give reason for, in a fixed order.
std::vector<Advice> advice(const RunFacts& facts);

const std::vector<std::string>& advice_names();

// Gives each warning once.
class Adviser {
 public:
  // `silenced` are names; one that does not exist is an Error.
  explicit Adviser(const std::vector<std::string>& silenced = {});
  std::vector<Advice> news(const RunFacts& facts);

 private:
  std::set<std::string> known_;
};

// Two lines for people: "warning: small-units: …" and its hint.
std::string describe(const Advice& advice);

}  // namespace fsdp::observe
