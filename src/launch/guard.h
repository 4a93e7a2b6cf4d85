// Guard: a small process beside the launcher that outlives it briefly. If the launcher dies without
// cleaning up (SIGKILL, a crash), PR_SET_PDEATHSIG kills the ranks, but their children would keep
// running. The guard sees its pipe close, kills the process groups it watches and removes what the
// launcher kept in memory.
#pragma once

#include <sys/types.h>

#include "launch/processes.h"

namespace fsdp::launch {

class Guard {
 public:
  // Construct it first: the guard must not hold descriptors (connections, pipes) that others wait
  // on.
  Guard();
  ~Guard();  // waits until the guard process has exited
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  void watch(pid_t group);
  void forget(pid_t group);  // before the system can reuse its number

 private:
  void send(pid_t group, bool watched);

  pid_t pid_ = 0;
  FileDescriptor pipe_;
};

}  // namespace fsdp::launch
