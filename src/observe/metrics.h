// The record of one training step, and the file that keeps them: metrics.jsonl, one JSON object per
// line.
//
// JSON has no form for non-finite numbers: they are written as the strings "NaN", "Infinity" and
// "-Infinity". Unknown values are left out.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::observe {

struct StepRecord {
  int64_t step = 0;  // counts from 1
  double epoch = 0;  // fractional: 1.5 is halfway through the second
  double loss = 0;
  std::optional<double> grad_norm;  // before clipping
  double lr = 0;
  int64_t tokens = 0;             // since the start of the run, over all ranks
  double tokens_per_s = 0;        // over all ranks
  double tflops = 0;              // of the model, per device; 0: unknown
  std::optional<double> mfu;      // share of the device's peak, 0..1
  double memory_mb = 0;           // MiB, peak of this rank so far
  double step_ms = 0;             // the whole step
  double data_ms = 0;             // of it, waiting for data
  std::optional<double> comm_ms;  // of it, exposed communication
  // Of every rank, on average since the ranks were last compared; empty: they weren't at this step.
  std::vector<double> rank_step_ms;
  std::vector<double> rank_wait_ms;  // waiting for other ranks
  bool skipped = false;              // loss or gradient wasn't finite, so nothing was updated
  std::optional<double> eval_loss;   // of an evaluation after this step
  std::optional<double> eval_perplexity;
  std::optional<double> scale;  // of the gradient scaler
  // Of DPO: the mean rewards of chosen and rejected answers, and the share of pairs in which the
  // chosen one has the greater.
  std::optional<double> reward_chosen, reward_rejected, reward_accuracy;
  // Of mixtures of experts: the largest and the smallest number of tokens of an expert, relative to
  // its mixture's mean; the mean entropy of tokens' scores, in nats; choices that no expert
  // computed.
  std::optional<double> expert_load_most, expert_load_least, router_entropy, dropped_tokens;
  // Of each mixture's experts, relative to the mean; empty: not written at this step.
  std::vector<std::vector<double>> expert_load;
};

// A line of metrics.jsonl, without the newline.
std::string to_json(const StepRecord& record);

class MetricsLog {
 public:
  // Opens `file` to append. First removes the lines of steps after `resume_step`, and an incomplete
  // last line of a killed run; 0 removes all. The lines that stay are written to a temporary file,
  // which is then renamed, so that a kill in between loses none.
  explicit MetricsLog(std::string file, int64_t resume_step = 0);
  ~MetricsLog();
  MetricsLog(const MetricsLog&) = delete;
  MetricsLog& operator=(const MetricsLog&) = delete;

  // Writes one line. On return it is in the file, but not necessarily on the disk.
  void write(const StepRecord& record);

 private:
  std::string file_;
  int handle_ = -1;
};

}  // namespace fsdp::observe
