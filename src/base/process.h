// Other processes on this host: whether they are alive, and whether they are stopped. Tells a dead
// rank from a slow one within milliseconds instead of after a timeout.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "base/namespace.h"

namespace fsdp::base {

// Two processes with the same identity see each other's /proc entries and memory: they run under
// the same boot of the same kernel, in one PID namespace. FSDP_HOST_ID overrides it, to simulate
// several hosts on one.
std::string host_identity();

// The host's name, for people; "this host" if it has none.
std::string host_name();

// When a process began, in the kernel's ticks since boot: together with its PID, this tells it from
// all others of this boot. 0 if there is no such process.
int64_t start_of(pid_t pid);

// A handle on a running process. It stays valid when the kernel reuses the PID.
class Process {
 public:
  Process() = default;
  explicit Process(pid_t pid);
  Process(Process&& other) noexcept;
  Process& operator=(Process&& other) noexcept;
  ~Process();

  pid_t pid() const { return pid_; }
  bool alive() const;    // false once it has exited or was killed; a zombie isn't alive
  bool stopped() const;  // by SIGSTOP, the terminal or a debugger
  bool ending() const;   // it was killed, and its memory and files are being released

 private:
  pid_t pid_ = 0;
  int handle_ = -1;  // pidfd; -1 if the kernel has no pidfds
};

}  // namespace fsdp::base
