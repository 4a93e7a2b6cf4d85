// Guard: a small process beside the launcher that outlives it by a moment. When the launcher goes
// away without cleaning up (SIGKILL, a crash), ranks die by PR_SET_PDEATHSIG, but their children
// would live on; the guard sees its pipe close and kills the process groups that it was told of.
#pragma once

#include <sys/types.h>

#include "launch/processes.h"

namespace fsdp::launch {

class Guard {
 public:
  // Call it first: the guard must not hold descriptors (connections, pipes) that others wait on.
  Guard();
  ~Guard();  // waits for its end
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  void watch(pid_t group);
  void forget(pid_t group);  // before its number can be anybody else's

 private:
  void tell(pid_t message);

  pid_t pid_ = 0;
  FileDescriptor pipe_;
};

}  // namespace fsdp::launch
