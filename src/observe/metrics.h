// What is known about one training step, and the file that keeps it: metrics.jsonl, one JSON object
// a line.
//
// Numbers that are not finite have no form in JSON: they are written as the texts "NaN", "Infinity"
// and "-Infinity". A value that is not known is left out.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace fsdp::observe {

struct StepRecord {
  int64_t step = 0;  // counts from 1: the step that was just done
  double epoch = 0;  // of the data, as a fraction: 1.5 is half way through the second
  double loss = 0;
  std::optional<double> grad_norm;  // before clipping
  double lr = 0;
  int64_t tokens = 0;               // since the first step of the run, all ranks
  double tokens_per_s = 0;          // all ranks
  double tflops = 0;                // of the model, each device; 0: unknown
  std::optional<double> mfu;        // 0..1 of the device's peak
  double memory_mb = 0;             // MiB, the most of this rank so far
  double step_ms = 0;               // the whole step
  double data_ms = 0;               // of it, waiting for data
  std::optional<double> comm_ms;    // of it, communication that nothing was computed beside
  bool skipped = false;             // loss or gradient was not finite: nothing was updated
  std::optional<double> eval_loss;  // where this step was followed by an evaluation
  std::optional<double> eval_perplexity;
  std::optional<double> scale;  // of the gradient scaler
};

// The record as a line of metrics.jsonl, without the line's end.
std::string to_json(const StepRecord& record);

class MetricsLog {
 public:
  // Opens FILE to append. Lines of steps after `resume_step` are cut off first, and with them a
  // last line that a killed run left unfinished; 0 begins anew. The old lines are written to a
  // temporary file that then takes the name, so that a kill in between loses none.
  explicit MetricsLog(std::string file, int64_t resume_step = 0);
  ~MetricsLog();
  MetricsLog(const MetricsLog&) = delete;
  MetricsLog& operator=(const MetricsLog&) = delete;

  // Writes one line; it is in the file (not: on the disk) when this returns.
  void write(const StepRecord& record);

 private:
  std::string file_;
  int handle_ = -1;
};

}  // namespace fsdp::observe
