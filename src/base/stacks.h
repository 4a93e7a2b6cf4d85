// Stacks: where the threads of this process are, for reports about a step that doesn't end.
//
// Each thread is interrupted by a signal for a moment and walks its own stack. A thread that is
// stuck in the kernel, or that blocks all signals, doesn't answer; what the kernel says about it is
// given instead.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

#include "base/namespace.h"

namespace fsdp::base {

struct ThreadStack {
  pid_t thread = 0;
  std::string name;
  std::string state;                // "sleeping in futex_wait"
  std::vector<std::string> frames;  // the innermost first; empty: no answer
};

// The calling thread is left out. The main thread comes first. `limit`: for each thread.
std::vector<ThreadStack> other_stacks(
    std::chrono::milliseconds limit = std::chrono::milliseconds(200));

// "fsdp::Work::wait() const+0x1f (libfsdp.so)"
std::string describe_address(void* address);

}  // namespace fsdp::base
