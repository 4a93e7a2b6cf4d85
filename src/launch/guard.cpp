#include "launch/guard.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <set>

#include "base/log.h"
#include "launch/memory_folder.h"

namespace fsdp::launch {
namespace {

// What the launcher tells the guard through the pipe.
struct GuardOrder {
  pid_t group;
  bool watched;  // false: forget it
};

// The guard process.
[[noreturn]] void guard_groups(int pipe) {
  setpgid(0, 0);  // Ctrl-C must not reach it
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_BLOCK, &all, nullptr);
  prctl(PR_SET_NAME, "fsdp-guard");
  for (int stream : {0, 1, 2}) close(stream);
  std::set<pid_t> groups;
  GuardOrder order;
  while (read(pipe, &order, sizeof order) == sizeof order) {
    if (order.watched) {
      groups.insert(order.group);
    } else {
      groups.erase(order.group);
    }
  }
  for (pid_t group : groups) kill(-group, SIGKILL);
  remove_dead_memory_folders();
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
    guard_groups(read_end.get());
  }
  if (pid_ < 0) {
    pid_ = 0;
    log::warn("can't start the process that cleans up after a killed launcher; see ulimit -u.");
    return;
  }
  pipe_ = std::move(write_end);
}

Guard::~Guard() {
  pipe_.close();
  if (pid_ > 0) waitpid(pid_, nullptr, 0);  // Ends: it exits when its pipe closes
}

void Guard::watch(pid_t group) {
  send(group, true);
}

void Guard::forget(pid_t group) {
  send(group, false);
}

void Guard::send(pid_t group, bool watched) {
  const GuardOrder order{group, watched};
  // The run continues if the guard was killed. SIGPIPE is ignored while there are ranks.
  while (pipe_ && write(pipe_.get(), &order, sizeof order) < 0 && errno == EINTR) {
  }
}

}  // namespace fsdp::launch
