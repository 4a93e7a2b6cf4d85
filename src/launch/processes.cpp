#include "launch/processes.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

#include "fsdp/error.h"

namespace fsdp::launch {

struct SignalState {
  sigset_t mask;
  struct sigaction pipe;
  struct sigaction child;
};

namespace {

struct Pipe {
  FileDescriptor read, write;
};

Pipe make_pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    throw Error(std::string("cannot make a pipe: ") + std::strerror(errno) + ".",
                "every rank takes three; raise the limit with: ulimit -n 65536");
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
        return "it is not in PATH; there is one in this folder: ./" + program;
      }
      if (has_folder && access(program.c_str(), F_OK) == 0) {
        return "the file is there; the interpreter of its first line (#!) or its loader is not.";
      }
      return has_folder ? "there is no such file."
                        : "it is not in PATH; a file needs its folder: ./" + program;
    case EACCES:
      return "is it a program? chmod +x " + program;
    case ENOEXEC:
      return "a script needs a first line that names its interpreter: #!/bin/sh";
    case E2BIG:
      return "its arguments and environment are too long for the system.";
    default:
      return "try to run it by itself.";
  }
}

// In the child, between fork and exec: only what is safe there. Does not return.
[[noreturn]] void become(char* const* argv, char* const* envp, int in, int out, int err,
                         int problem, pid_t launcher, const Signals& signals) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != launcher) _exit(127);  // the launcher died before prctl was there to notice
  dup2(in, 0);  // clears close-on-exec, as all three differ from what they become
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

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = other.fd_;
    other.fd_ = -1;
  }
  return *this;
}

void FileDescriptor::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

Signals::Signals() : before_(new SignalState) {
  sigset_t ours;
  sigemptyset(&ours);
  for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) sigaddset(&ours, signal);
  sigprocmask(SIG_BLOCK, &ours, &before_->mask);
  struct sigaction action = {};
  action.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &action, &before_->pipe);
  action.sa_handler = SIG_DFL;  // a parent that ignores SIGCHLD would have our ranks buried unseen
  sigaction(SIGCHLD, &action, &before_->child);
  fd_ = FileDescriptor(signalfd(-1, &ours, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd_) {
    throw Error(std::string("cannot receive signals: signalfd: ") + std::strerror(errno) + ".",
                "raise the limit of open files with: ulimit -n 65536");
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
  sigaction(SIGCHLD, &before_->child, nullptr);
  sigprocmask(SIG_SETMASK, &before_->mask, nullptr);
}

Process start(const std::vector<std::string>& command, const std::vector<std::string>& environment,
              bool with_stdin, const Signals& signals, int& exec_errno) {
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
    throw Error(std::string("cannot start another process: ") + std::strerror(errno) + ".",
                "too many ranks for this machine? See ulimit -u, and -n auto.");
  }
  if (process.pid == 0) {
    become(argv.data(), envp.data(), null ? null.get() : 0, out.write.get(), err.write.get(),
           problem.write.get(), launcher, signals);
  }
  setpgid(process.pid, process.pid);  // both sides do it: whoever comes first
  problem.write.close();
  int why = 0;
  ssize_t got;
  do got = read(problem.read.get(), &why, sizeof why);  // ends when exec closes the other end
  while (got < 0 && errno == EINTR);
  if (got == sizeof why) {
    waitpid(process.pid, nullptr, 0);
    exec_errno = why;
    throw Error("cannot run \"" + command.front() + "\": " + std::strerror(why) + ".",
                exec_hint(command.front(), why));
  }
  process.out = std::move(out.read);
  process.err = std::move(err.read);
  fcntl(process.out.get(), F_SETFL, O_NONBLOCK);
  fcntl(process.err.get(), F_SETFL, O_NONBLOCK);
  return process;
}

void look(Process& process) {
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
  waitpid(process.pid, nullptr, 0);
  process.pid = 0;
}

}  // namespace fsdp::launch
