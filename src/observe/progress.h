// What a person sees of a run. On a terminal: one live line with a bar, rewritten in place, with
// everything else printed above it. Elsewhere: an aligned line every so many steps.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>

#include "observe/metrics.h"

namespace fsdp::observe {

struct ProgressOptions {
  int64_t steps = 0;  // of the whole run; 0: not known
  int width = 0;      // columns of the terminal; 0: there is none
  bool colour = false;
  int64_t every = 10;  // steps between lines without a terminal
};

// Not for several threads. Nothing reads a clock: speed and time left come from the records.
class Progress {
 public:
  Progress(std::ostream& out, ProgressOptions options);
  ~Progress();  // as finish()
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void step(const StepRecord& record);
  void line(const std::string& text);  // text of one or more lines, above the live line
  void finish();                       // leaves the last state of the live line where it is

 private:
  void draw();
  void clear();

  std::ostream& out_;
  ProgressOptions options_;
  std::optional<StepRecord> last_;
  bool drawn_ = false;     // a live line stands on the terminal
  bool changed_ = false;   // what stands there is not the last record
  double undrawn_ms_ = 0;  // of steps since the last drawing
  int64_t records_ = 0;
  double smooth_ms_ = 0;  // a step, exponentially averaged
};

// The two kinds of line, without a line's end. `left_s`: seconds to the end of the run, if known.
std::string live_line(const StepRecord& record, const ProgressOptions& options,
                      std::optional<double> left_s);
std::string plain_line(const StepRecord& record, const ProgressOptions& options,
                       std::optional<double> left_s);

}  // namespace fsdp::observe
