#include "launch/processes.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::launch {

struct SignalState {
  sigset_t mask;
  struct sigaction pipe;
  struct sigaction child;
  struct sigaction size;
};

namespace {

struct Pipe {
  FileDescriptor read, write;
};

Pipe make_pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    throw Error(formatted("can't create a pipe: {}.", std::strerror(errno)),
                "the launcher keeps up to three descriptors open per rank; raise the limit with: "
                "ulimit -n 65536");
  }
  return {FileDescriptor(ends[0]), FileDescriptor(ends[1])};
}

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (const auto& text : texts) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

std::string exec_hint(const std::string& program, int problem) {
  bool has_folder = program.find('/') != std::string::npos;
  switch (problem) {
    case ENOENT:
      if (!has_folder && access(program.c_str(), F_OK) == 0) {
        return "it isn't in PATH, but this folder has one: ./" + program;
      }
      if (has_folder && access(program.c_str(), F_OK) == 0) {
        return "the file exists; the interpreter in its first line (#!) or its loader doesn't.";
      }
      return has_folder ? "there is no such file."
                        : "it isn't in PATH; name a file with its folder: ./" + program;
    case EACCES:
      return "is it a program? chmod +x " + program;
    case ENOEXEC:
      return "the first line of a script must name its interpreter: #!/bin/sh";
    case E2BIG:
      return "its arguments and environment are too long for the system.";
    default:
      return "try to run it by itself.";
  }
}

// Runs in the child between fork and exec, so it may only call async-signal-safe functions.
[[noreturn]] void become(char* const* argv, char* const* envp, int in, int out, int err,
                         int problem, int inherited, pid_t launcher, const Signals& signals) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != launcher) _exit(127);  // the launcher died before the prctl took effect
  if (inherited >= 0) fcntl(inherited, F_SETFD, 0);
  dup2(in, 0);  // clears close-on-exec: none of the three has its new number already
  dup2(out, 1);
  dup2(err, 2);
  signals.restore();
  execvpe(argv[0], argv, envp);
  int why = errno;
  while (write(problem, &why, sizeof why) < 0 && errno == EINTR) {
  }
  _exit(127);
}

}  // namespace

Signals::Signals() : before_(new SignalState) {
  sigset_t ours;
  sigemptyset(&ours);
  for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGCHLD}) sigaddset(&ours, signal);
  sigprocmask(SIG_BLOCK, &ours, &before_->mask);
  struct sigaction action = {};
  action.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &action, &before_->pipe);
  sigaction(SIGXFSZ, &action, &before_->size);  // a log beyond ulimit -f ends; the run goes on
  action.sa_handler = SIG_DFL;  // if inherited as ignored, ranks would be reaped unseen
  sigaction(SIGCHLD, &action, &before_->child);
  fd_ = FileDescriptor(signalfd(-1, &ours, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd_) {
    throw Error(formatted("can't receive signals: signalfd: {}.", std::strerror(errno)),
                "raise the limit on open files with: ulimit -n 65536");
  }
}

Signals::~Signals() {
  restore();
  delete before_;
}

int Signals::next() {
  signalfd_siginfo info;
  return read(fd_.get(), &info, sizeof info) == sizeof info ? static_cast<int>(info.ssi_signo) : 0;
}

void Signals::restore() const {
  sigaction(SIGPIPE, &before_->pipe, nullptr);
  sigaction(SIGXFSZ, &before_->size, nullptr);
  sigaction(SIGCHLD, &before_->child, nullptr);
  sigprocmask(SIG_SETMASK, &before_->mask, nullptr);
}

Process start(const std::vector<std::string>& command, const std::vector<std::string>& environment,
              bool with_stdin, int inherited, const Signals& signals, int& exec_errno) {
  Pipe out = make_pipe(), err = make_pipe(), problem = make_pipe();
  FileDescriptor null;
  if (!with_stdin || isatty(0)) null = FileDescriptor(open("/dev/null", O_RDONLY | O_CLOEXEC));
  auto argv = pointers(command);
  auto envp = pointers(environment);

  Process process;
  pid_t launcher = getpid();
  process.pid = fork();
  if (process.pid < 0) {
    exec_errno = errno;
    throw Error(formatted("can't start another process: {}.", std::strerror(errno)),
                "lower the number of ranks (-n auto fits the machine), or raise ulimit -u.");
  }
  if (process.pid == 0) {
    become(argv.data(), envp.data(), null ? null.get() : 0, out.write.get(), err.write.get(),
           problem.write.get(), inherited, launcher, signals);
  }
  setpgid(process.pid, process.pid);  // parent and child both do it; either may come first
  problem.write.close();
  int why = 0;
  ssize_t got;
  do got = read(problem.read.get(), &why, sizeof why);  // ends when exec closes the other end
  while (got < 0 && errno == EINTR);
  if (got == sizeof why) {
    waitpid(process.pid, nullptr, 0);  // Ends: it exits without a program
    exec_errno = why;
    throw Error(formatted("can't run \"{}\": {}.", command.front(), std::strerror(why)),
                exec_hint(command.front(), why));
  }
  process.out = std::move(out.read);
  process.err = std::move(err.read);
  fcntl(process.out.get(), F_SETFL, O_NONBLOCK);
  fcntl(process.err.get(), F_SETFL, O_NONBLOCK);
  return process;
}

void check_exit(Process& process) {
  siginfo_t info = {};
  if (process.pid == 0 || process.exit) return;
  if (waitid(P_PID, process.pid, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0)
    return;
  Exit exit;
  (info.si_code == CLD_EXITED ? exit.code : exit.signal) = info.si_status;
  process.exit = exit;
}

void signal_group(const Process& process, int signal) {
  if (process.pid > 0) kill(-process.pid, signal);
}

void release(Process& process) {
  if (process.pid == 0) return;
  signal_group(process, SIGKILL);
  waitpid(process.pid, nullptr, 0);  // Ends: it has exited
  process.pid = 0;
}

}  // namespace fsdp::launch
