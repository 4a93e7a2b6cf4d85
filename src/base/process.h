// Other processes of this host: whether they still live, and what they are doing when they do not
// answer. Used to tell a rank that died from one that is slow, in milliseconds instead of at the
// end of a timeout.
#pragma once

#include <sys/types.h>

#include <string>

namespace fsdp {

// Two processes with equal text can see each other's /proc entries and memory: the same boot of the
// same kernel and one PID namespace. FSDP_HOST_ID overrides it (to play several hosts on one).
std::string host_identity();

// A handle on a running process that survives reuse of its number.
class Process {
 public:
  Process() = default;
  explicit Process(pid_t pid);
  Process(Process&& other) noexcept;
  Process& operator=(Process&& other) noexcept;
  ~Process();

  pid_t pid() const { return pid_; }
  bool alive() const;    // false once it exited or was killed, also as a zombie
  bool stopped() const;  // SIGSTOP, a terminal's stop, or a debugger

 private:
  pid_t pid_ = 0;
  int handle_ = -1;  // pidfd; -1 where the kernel has none
};

}  // namespace fsdp
