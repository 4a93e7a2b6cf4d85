// The summary at the end of a run: time by part, and results.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace fsdp::observe {

struct RunSummary {
  double total_s = 0;  // wall time of the loop, including the parts below
  double data_s = 0;   // waiting for data
  double comm_s = 0;   // exposed communication
  double compute_s = 0;
  double checkpoint_s = 0;
  double evaluation_s = 0;  // including samples
  int64_t steps = 0;        // by this process, not before a resume
  int64_t skipped = 0;
  int64_t tokens = 0;         // in these steps, over all ranks
  double peak_memory_mb = 0;  // MiB
  std::optional<double> first_loss, last_loss;
  std::optional<double> eval_loss;  // of the last evaluation
  bool has_perplexity = true;       // the loss is of likelihoods
  std::optional<double> tflops;     // per device, over all steps
  std::optional<double> mfu;
};

// Lines of text. Time outside all parts is "other"; the percentages add up to 100.
std::string describe(const RunSummary& summary, bool colour = false);

}  // namespace fsdp::observe
