// Launched: the real fsdp binary, started by a test, with what it prints collected. Whatever
// happens it is gone when the test is; whatever is waited for is waited for at most a minute.
#pragma once

#include <gtest/gtest.h>

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace fsdp::launch {

// Polls until `condition` holds; false after `limit`.
bool eventually(const std::function<bool()>& condition,
                std::chrono::seconds limit = std::chrono::minutes(1));

// True while the process exists and is not a zombie that nobody has buried yet.
bool is_alive(pid_t pid);

// A folder of its own, removed with everything in it.
class Folder {
 public:
  Folder();
  ~Folder();
  std::string operator/(const std::string& name) const { return path_ / name; }
  std::string path() const { return path_; }
  std::string read(const std::string& name) const;
  pid_t read_pid(
      const std::string& name) const;  // waits for the file and its line; 0 if none comes

 private:
  std::filesystem::path path_;
};

// {FSDP_BINARY, "run", arguments...}
std::vector<std::string> fsdp_run(std::vector<std::string> arguments);

class Launched {
 public:
  // `arguments`, the first of them a program; "NAME=value" of `environment` is added to ours,
  // "NAME" is taken away.
  explicit Launched(std::vector<std::string> arguments, std::vector<std::string> environment = {});
  ~Launched();
  Launched(const Launched&) = delete;
  Launched& operator=(const Launched&) = delete;

  pid_t pid() const { return pid_; }
  void signal(int signal) const;
  std::string out() const;
  std::string err() const;
  std::vector<std::string> out_lines() const;  // sorted: ranks come in any order

  // The exit code, or 128 + the signal that killed it, when it has ended and all output has come;
  // -1 when that took longer than `limit`.
  int wait(std::chrono::seconds limit = std::chrono::minutes(1));

 private:
  void read_all(int fd, std::string& text);

  pid_t pid_ = 0;
  int code_ = -1;
  bool waited_ = false;
  mutable std::mutex mutex_;
  std::string out_, err_;
  std::vector<std::thread> readers_;
};

// Whether `part` is somewhere in `text`; shows the text where it is not.
inline testing::AssertionResult has(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "no \"" << part << "\" in:\n" << text;
}

}  // namespace fsdp::launch
