#include "base/subprocess.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace fsdp::base {
namespace {

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> all;
  for (const auto& text : texts) all.push_back(const_cast<char*>(text.c_str()));
  all.push_back(nullptr);
  return all;
}

}  // namespace

Finished run_program(const std::vector<std::string>& arguments, bool quiet,
                     const std::function<void(const std::string&)>& on_line,
                     const std::vector<environment::Change>& changes) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return {127, ""};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
  if (quiet) posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
  auto variables = environment::changed(changes);
  pid_t pid = 0;
  int problem = posix_spawnp(&pid, arguments[0].c_str(), &actions, nullptr,
                             pointers(arguments).data(), pointers(variables).data());
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  Finished finished{127, ""};
  if (problem == 0) {
    char buffer[4096];
    size_t shown = 0;
    for (;;) {
      ssize_t n = read(ends[0], buffer, sizeof buffer);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) break;
      finished.output.append(buffer, n);
      for (size_t end; on_line && (end = finished.output.find('\n', shown)) != std::string::npos;
           shown = end + 1)
        on_line(finished.output.substr(shown, end - shown));
    }
    int status = 0;
    // Ends: it has closed its output. Programs that may hang are started with `timeout`.
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    finished.code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }
  close(ends[0]);
  return finished;
}

std::string own_binary() {
  char path[4096];
  ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
  return n > 0 ? std::string(path, n) : "fsdp";
}

}  // namespace fsdp::base
