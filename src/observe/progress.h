// Progress: a run on the screen. On a terminal, one live line with a bar, redrawn in place; above
// it a row of loss history for each tenth of the run, and all other text. Elsewhere, an aligned
// line every few steps and at least every 15 s.
#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <optional>
#include <string>

#include "observe/metrics.h"

namespace fsdp::observe {

struct ProgressOptions {
  int64_t steps = 0;  // of the whole run; 0: unknown
  int width = 0;      // columns of the terminal; 0: no terminal
  bool colour = false;
  bool unicode = false;
  int64_t every = 10;  // steps between lines without a terminal
  // Monotonic, in seconds; empty: the steady clock. Only the 15 s rule reads it: speed and time
  // left come from the records.
  std::function<double()> clock = {};
};

// Not thread-safe. While a live line is drawn, log lines (base/log.h) of this process clear it
// first.
class Progress {
 public:
  Progress(std::ostream& out, ProgressOptions options);
  ~Progress();  // calls finish()
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void step(const StepRecord& record);
  // Losses that aren't of likelihoods have no perplexity.
  void evaluation(int64_t step, double loss, std::optional<double> perplexity);
  void line(const std::string& text);  // one or more lines of text, above the live line
  void finish();                       // draws the live line a last time and leaves it there

 private:
  void draw();
  void clear();
  void add_to_history(const StepRecord& record);
  std::string row(const char* what, int64_t step, double loss, const char* colour) const;

  std::ostream& out_;
  ProgressOptions options_;
  std::optional<StepRecord> last_;
  bool drawn_ = false;     // the live line is on the terminal
  bool changed_ = false;   // and shows an older record than the last
  double undrawn_ms_ = 0;  // duration of the steps since it was drawn
  double printed_s_ = 0;   // time of the last line without a terminal
  int64_t records_ = 0;
  double smooth_ms_ = 0;  // of a step, exponentially averaged
  // Steps since the last row of the history.
  double row_loss_ = 0, row_ms_ = 0;  // sums
  int64_t row_steps_ = 0;
  std::optional<double> full_loss_;  // the first loss: a bar of full length
};

// The two kinds of line, without a newline. `left_s`: seconds to the end of the run, if known.
std::string live_line(const StepRecord& record, const ProgressOptions& options,
                      std::optional<double> left_s);
std::string plain_line(const StepRecord& record, const ProgressOptions& options,
                       std::optional<double> left_s);

}  // namespace fsdp::observe
