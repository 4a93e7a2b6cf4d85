// A rank as the operating system sees it: a process in its own group, with pipes for its output.
//
// The group lets a rank's own children (data loaders) end with it. A rank that has exited stays a
// zombie until release(): until then the system can't reuse its group's number, so a signal to the
// group never hits another process.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "base/file_descriptor.h"

namespace fsdp::launch {

struct Exit {
  int code = 0;    // if it exited by itself
  int signal = 0;  // if a signal killed it; 0: none
  bool clean() const { return code == 0 && signal == 0; }
};

struct Process {
  pid_t pid = 0;       // and process group; 0: released
  FileDescriptor out;  // read ends, non-blocking
  FileDescriptor err;
  std::optional<Exit> exit;  // once known
};

// Signal dispositions at the launcher's start; ranks get them back.
struct SignalState;

// Takes over the signals: SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGCHLD are read from fd() instead
// of interrupting, and SIGPIPE becomes an errno. Signals that our parent ignored (nohup) stay
// ignored.
class Signals {
 public:
  Signals();
  ~Signals();
  int fd() const { return fd_.get(); }
  int next();            // the next pending signal; 0: none
  void restore() const;  // in a child between fork and exec

 private:
  SignalState* before_;
  FileDescriptor fd_;
};

// Starts `command` with `environment`. The process dies with the launcher, even if that is killed
// with SIGKILL. With `with_stdin` it reads our standard input unless that is a terminal; otherwise
// it reads nothing, because a terminal stops processes outside its foreground group that read from
// it. The process inherits the descriptor `inherited` under the same number; -1: none. Throws an
// Error with a hint if the program can't be executed; `exec_errno` then has the reason.
Process start(const std::vector<std::string>& command, const std::vector<std::string>& environment,
              bool with_stdin, int inherited, const Signals& signals, int& exec_errno);

// Sets process.exit if the process has exited, without releasing it.
void check_exit(Process& process);

void signal_group(const Process& process, int signal);

// Kills what is left of the group and reaps the process, which must have exited.
void release(Process& process);

}  // namespace fsdp::launch
