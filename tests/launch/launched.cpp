#include "launch/launched.h"
#include "paths.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

namespace fsdp::launch {

using namespace std::chrono_literals;

bool eventually(const std::function<bool()>& condition, std::chrono::seconds limit) {
  auto deadline = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(10ms);
  }
  return true;
}

bool is_alive(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string stat;
  std::getline(file, stat);  // an iterator would throw if the process goes between open and read
  auto end = stat.rfind(')');  // "pid (name) S ..."
  return end != std::string::npos && end + 2 < stat.size() && stat[end + 2] != 'Z';
}

bool is_gone(pid_t pid) {
  return pid > 0 && eventually([&] { return !is_alive(pid); });
}

Folder::Folder() {
  std::string pattern = std::filesystem::temp_directory_path() / "fsdp-launch-XXXXXX";
  path_ = mkdtemp(pattern.data());
}

Folder::~Folder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string Folder::read(const std::string& name) const {
  std::ifstream file(path_ / name);
  return {std::istreambuf_iterator<char>(file), {}};
}

pid_t Folder::read_pid(const std::string& name) const {
  std::string text;
  eventually([&] { return (text = read(name)).ends_with('\n'); });
  return std::atoi(text.c_str());
}

std::vector<std::string> fsdp_run(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {paths::program("fsdp"), "run"});
  return arguments;
}

Launched::Launched(std::vector<std::string> arguments, std::vector<std::string> environment) {
  int out[2], err[2];
  if (pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0) std::abort();
  std::vector<char*> argv;
  for (auto& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  pid_ = fork();
  if (pid_ == 0) {
    int null = open("/dev/null", O_RDONLY);
    dup2(null, 0);
    dup2(out[1], 1);
    dup2(err[1], 2);
    for (auto& entry : environment) {
      if (entry.find('=') == std::string::npos) {
        unsetenv(entry.c_str());
      } else {
        putenv(entry.data());
      }
    }
    execvp(argv[0], argv.data());
    std::perror(argv[0]);
    _exit(99);
  }
  close(out[1]);
  close(err[1]);
  readers_.emplace_back([this, fd = out[0]] { read_all(fd, out_); });
  readers_.emplace_back([this, fd = err[0]] { read_all(fd, err_); });
}

Launched::~Launched() {
  if (!waited_) {
    kill(pid_, SIGKILL);  // its ranks die with it
    wait();
  }
}

void Launched::signal(int signal) const {
  kill(pid_, signal);
}

void Launched::read_all(int fd, std::string& text) {
  char buffer[64 * 1024];
  ssize_t got;
  while ((got = read(fd, buffer, sizeof buffer)) > 0) {
    std::lock_guard lock(mutex_);
    text.append(buffer, got);
  }
  close(fd);
}

std::string Launched::out() const {
  std::lock_guard lock(mutex_);
  return out_;
}

std::string Launched::err() const {
  std::lock_guard lock(mutex_);
  return err_;
}

std::vector<std::string> Launched::out_lines() const {
  std::istringstream text(out());
  std::vector<std::string> lines;
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  std::sort(lines.begin(), lines.end());
  return lines;
}

int Launched::wait(std::chrono::seconds limit) {
  if (waited_) return code_;
  waited_ = true;
  int status = 0;
  bool ended = eventually([&] { return waitpid(pid_, &status, WNOHANG) == pid_; }, limit);
  if (ended) {
    code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  } else {
    kill(pid_, SIGKILL);
    waitpid(pid_, &status, 0);
  }
  for (auto& reader : readers_) reader.join();
  return code_;
}

Ended run_to_end(std::vector<std::string> arguments, std::vector<std::string> environment) {
  Launched program(std::move(arguments), std::move(environment));
  const int code = program.wait();
  return {code, program.out(), program.err()};
}

}  // namespace fsdp::launch
