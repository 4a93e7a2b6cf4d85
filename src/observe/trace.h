// Trace: a recording of LibTorch's profiler between start() and save(), split() or spans(), which
// must be called on the same thread. A process can have one at a time.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "observe/step_split.h"
#include "observe/step_trace.h"

namespace fsdp::observe {

inline constexpr const char* kSplitScope = "fsdp: split";

class Trace {
 public:
  Trace() = default;
  ~Trace();  // drops a recording that wasn't saved
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  // `all_threads`: also those that were started before.
  void start(bool all_threads = false);
  void save(const std::string& path);
  // The nanoseconds of each part of what ran within RECORD_USER_SCOPE(kSplitScope).
  std::array<int64_t, kParts> split();
  // All that was seen, by begin. Waits for the device.
  std::vector<TraceSpan> spans();

 private:
  bool on_ = false;
};

}  // namespace fsdp::observe
