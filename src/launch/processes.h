// A rank as an operating system sees it: a process in its own group, with pipes for what it prints.
//
// The group exists so that a rank's own children (data loaders) end with it. A rank that has exited
// stays a zombie until release(): as long as it does, its group's number cannot be given to
// somebody else, so a signal to the group never hits a stranger.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

namespace fsdp::launch {

class FileDescriptor {  // owns it
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  ~FileDescriptor() { close(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void close();

 private:
  int fd_ = -1;
};

struct Exit {
  int code = 0;    // where it exited by itself
  int signal = 0;  // where a signal killed it; 0: none
  bool clean() const { return code == 0 && signal == 0; }
};

struct Process {
  pid_t pid = 0;       // and process group; 0: released
  FileDescriptor out;  // read ends, not blocking
  FileDescriptor err;
  std::optional<Exit> exit;  // once it is known
};

// Signals as they were when the launcher started; ranks get them back.
struct SignalState;

// Takes over the signals: SIGINT, SIGTERM, SIGHUP and SIGCHLD are read from fd() instead of
// interrupting, SIGPIPE is an errno. What our parent had ignored (nohup) stays ignored.
class Signals {
 public:
  Signals();
  ~Signals();
  int fd() const { return fd_.get(); }
  int next();            // a signal that came, 0 when there is none
  void restore() const;  // in a child between fork and exec

 private:
  SignalState* before_;
  FileDescriptor fd_;
};

// Starts `command` with `environment`. It dies with the launcher, whatever ends that (SIGKILL too).
// `with_stdin`: it reads our standard input, unless that is a terminal; else it reads nothing: a
// process outside the terminal's foreground group that reads from the terminal is stopped by it.
// Throws an Error with a hint when the program cannot be executed; `exec_errno` then tells why.
Process start(const std::vector<std::string>& command, const std::vector<std::string>& environment,
              bool with_stdin, const Signals& signals, int& exec_errno);

// Looks whether it has exited, without releasing it.
void look(Process& process);

void signal_group(const Process& process, int signal);

// Kills what is left of its group and buries it. It must have exited.
void release(Process& process);

}  // namespace fsdp::launch
