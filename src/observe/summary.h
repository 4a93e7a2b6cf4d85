// The table at the end of a run: where the time went, and what came out.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace fsdp::observe {

struct RunSummary {
  double total_s = 0;  // wall time of the loop; the parts below lie in it
  double data_s = 0;   // waiting for data
  double comm_s = 0;   // communication that nothing was computed beside
  double compute_s = 0;
  double checkpoint_s = 0;
  double evaluation_s = 0;  // with sampling
  int64_t steps = 0;        // done in this run (not: before it was resumed)
  int64_t skipped = 0;
  int64_t tokens = 0;         // in this run, all ranks
  double peak_memory_mb = 0;  // MiB
  std::optional<double> first_loss, last_loss;
  std::optional<double> eval_loss;  // of the last evaluation
  std::optional<double> tflops;     // each device, over the steps
  std::optional<double> mfu;
};

// Lines for people. What no part accounts for is "other"; the percentages add up to 100.
std::string describe(const RunSummary& summary, bool colour = false);

}  // namespace fsdp::observe
