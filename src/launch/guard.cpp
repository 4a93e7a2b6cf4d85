#include "launch/guard.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <set>

#include "base/log.h"

namespace fsdp::launch {
namespace {

// The life of the guard: a positive number is a group to watch, a negative one a group to forget.
[[noreturn]] void stand(int pipe) {
  setpgid(0, 0);  // Ctrl-C is not for us
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_BLOCK, &all, nullptr);
  prctl(PR_SET_NAME, "fsdp-guard");
  for (int stream : {0, 1, 2}) close(stream);
  std::set<pid_t> groups;
  pid_t message;
  while (read(pipe, &message, sizeof message) == sizeof message) {
    if (message > 0) {
      groups.insert(message);
    } else {
      groups.erase(-message);
    }
  }
  for (pid_t group : groups) kill(-group, SIGKILL);
  _exit(0);
}

}  // namespace

Guard::Guard() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return;
  FileDescriptor read_end(ends[0]), write_end(ends[1]);
  pid_ = fork();
  if (pid_ == 0) {
    write_end.close();
    stand(read_end.get());
  }
  if (pid_ < 0) {
    pid_ = 0;
    log::warn("no process to guard the ranks' children could be started; see ulimit -u.");
    return;
  }
  pipe_ = std::move(write_end);
}

Guard::~Guard() {
  pipe_.close();
  if (pid_ > 0) waitpid(pid_, nullptr, 0);
}

void Guard::watch(pid_t group) {
  tell(group);
}

void Guard::forget(pid_t group) {
  tell(-group);
}

void Guard::tell(pid_t message) {
  // A guard that was killed is not needed to run on; SIGPIPE is ignored where there are ranks.
  while (pipe_ && write(pipe_.get(), &message, sizeof message) < 0 && errno == EINTR) {
  }
}

}  // namespace fsdp::launch
