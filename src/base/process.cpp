#include "base/process.h"

#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <sstream>
#include <string_view>
#include <utility>

#include "base/environment.h"
#include "base/format.h"
#include "base/regular_file.h"
#include "fsdp/error.h"

namespace fsdp::base {
namespace {

// The state letter of /proc/PID/stat, which follows the command's name in parentheses. 0 if the
// process is gone, '?' if its state is unknown (no descriptor left to open the file).
char state_of(pid_t pid) {
  const RegularFile file(formatted("/proc/{}/stat", pid));
  if (!file.is_open()) return file.code() == ENOENT || file.code() == ESRCH ? 0 : '?';
  char front[512];  // the name has at most 64 bytes
  std::string_view line;
  try {
    line = {front, file.read(front, sizeof front)};
  } catch (const Error&) {  // it ended in the meantime
  }
  if (line.empty()) return 0;
  size_t after_name = line.rfind(')');
  return after_name + 2 < line.size() ? line[after_name + 2] : 0;
}

}  // namespace

std::string host_name() {
  char name[256] = "";
  return ::gethostname(name, sizeof name - 1) == 0 && *name ? name : "this host";
}

std::string host_identity() {
  if (auto id = environment::text("FSDP_HOST_ID")) return *id;
  std::string identity = read_if_there("/proc/sys/kernel/random/boot_id");
  if (identity.ends_with('\n')) identity.pop_back();
  struct stat space {};
  if (stat("/proc/self/ns/pid", &space) == 0) identity += formatted(":{}", space.st_ino);
  return identity;
}

namespace {

// A number in /proc/PID/stat; fields count from 1, as in proc(5), and are behind the name's (2).
// 0 if there is no such process.
int64_t stat_field(pid_t pid, int number) {
  const std::string line = read_if_there(formatted("/proc/{}/stat", pid));
  if (line.empty()) return 0;
  std::string skipped;
  std::istringstream fields(line.substr(line.rfind(')') + 1));
  for (int i = 3; i < number; ++i) fields >> skipped;
  int64_t value = 0;
  return fields >> value ? value : 0;
}

}  // namespace

int64_t start_of(pid_t pid) {
  return stat_field(pid, 22);
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

bool Process::ending() const {
  constexpr int64_t kExiting = 4;  // the kernel's PF_EXITING
  if (stat_field(pid_, 9) & kExiting) return true;
  std::istringstream lines(read_if_there(formatted("/proc/{}/status", pid_)));
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with("SigPnd:") || line.starts_with("ShdPnd:"))
      if (std::strtoull(line.c_str() + 7, nullptr, 16) >> (SIGKILL - 1) & 1) return true;
  return false;
}

}  // namespace fsdp::base
