#include "base/process.h"

#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <sstream>
#include <utility>

#include "base/environment.h"
#include "base/format.h"

namespace fsdp::base {
namespace {

// The state letter of /proc/PID/stat, which follows the command's name in parentheses. 0 if the
// process is gone, '?' if its state is unknown (no descriptor left to open the file).
char state_of(pid_t pid) {
  errno = 0;
  std::ifstream file(formatted("/proc/{}/stat", pid));
  if (!file) return errno == ENOENT || errno == ESRCH ? 0 : '?';
  std::string line;
  if (!std::getline(file, line)) return 0;
  size_t after_name = line.rfind(')');
  return after_name + 2 < line.size() ? line[after_name + 2] : 0;
}

}  // namespace

std::string host_identity() {
  if (auto id = environment::text("FSDP_HOST_ID")) return *id;
  std::ifstream boot("/proc/sys/kernel/random/boot_id");
  std::string identity;
  std::getline(boot, identity);
  struct stat space {};
  if (stat("/proc/self/ns/pid", &space) == 0) identity += formatted(":{}", space.st_ino);
  return identity;
}

Process::Process(pid_t pid) : pid_(pid) {
#ifdef SYS_pidfd_open
  handle_ = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
#endif
}

Process::Process(Process&& other) noexcept {
  *this = std::move(other);
}

Process& Process::operator=(Process&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(handle_, other.handle_);
  return *this;
}

Process::~Process() {
  if (handle_ >= 0) close(handle_);
}

bool Process::alive() const {
  if (handle_ >= 0) {
    pollfd watched{handle_, POLLIN, 0};
    return poll(&watched, 1, 0) <= 0;  // readable once the process has ended
  }
  char state = state_of(pid_);
  return state != 0 && state != 'Z' && state != 'X';
}

bool Process::stopped() const {
  char state = state_of(pid_);
  return state == 'T' || state == 't';
}

}  // namespace fsdp::base
