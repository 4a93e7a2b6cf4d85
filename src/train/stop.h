// StopSignals: SIGTERM and SIGINT as a wish that the loop can see at the end of a step. A second
// one ends the process at once.
#pragma once

namespace fsdp::train {

class StopSignals {
 public:
  StopSignals();   // takes the two signals …
  ~StopSignals();  // … and gives them back
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  static int received();  // the first signal; 0: none yet
};

}  // namespace fsdp::train
