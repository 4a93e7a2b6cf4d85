// Trace: a recording of LibTorch's profiler between start() and save() or split(), which must be
// called on the same thread. A process can have one at a time.
#pragma once

#include <array>
#include <string>

#include "observe/step_split.h"

namespace fsdp::observe {

inline constexpr const char* kSplitScope = "fsdp: split";
inline constexpr const char* kLoadingScope = "fsdp: data loading";  // counts as Activity::kLoading

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

 private:
  bool on_ = false;
};

}  // namespace fsdp::observe
