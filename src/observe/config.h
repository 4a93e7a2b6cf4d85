// [log] of a run's config.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/options.h"

namespace fsdp::observe {

struct LogConfig {
  int64_t every = 10;  // steps between lines without a terminal
  bool tensorboard = true;
  int64_t compare_ranks = 50;        // steps between comparisons of the ranks' times; 0: none
  double peak_tflops = 0;            // of one device, for MFU; 0: built in, for known GPUs
  std::vector<std::string> silence;  // names of warnings to turn off
};

inline void describe(LogConfig& log, OptionList& list) {
  list.section("log", "Output and metrics");
  list.add("every", log.every,
           "Steps between lines if output isn't a terminal; a line is printed at least every 15 s",
           {.least = 1});
  list.add("tensorboard", log.tensorboard, "Also write metrics as TensorBoard events");
  list.add(
      "compare_ranks", log.compare_ranks,
      "Steps between comparisons of the ranks' step times and waiting times, which find a slow "
      "rank or host; 0: none",
      {.least = 0});
  list.add("peak_tflops", log.peak_tflops,
           "Peak TFLOP/s of one device, for MFU; 0: built-in value if the GPU is known",
           {.least = 0});
  list.add("silence", log.silence, "Names of warnings to turn off");
}

}  // namespace fsdp::observe
