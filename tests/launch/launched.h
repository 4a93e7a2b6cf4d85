// Launched: the real fsdp binary, started by a test, with its output collected. It never outlives
// the test, and every wait is limited to a minute.
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

#include "paths.h"

namespace fsdp::launch {

// Polls until `condition` holds; false after `limit`.
bool eventually(const std::function<bool()>& condition,
                std::chrono::seconds limit = std::chrono::minutes(1));

// Whether the process exists and isn't a zombie.
bool is_alive(pid_t pid);
bool is_gone(pid_t pid);  // waits until it isn't alive; false for pid 0

// A temporary folder, removed with its contents.
class Folder {
 public:
  Folder();
  ~Folder();
  std::string operator/(const std::string& name) const { return path_ / name; }
  std::string path() const { return path_; }
  std::string read(const std::string& name) const;
  // Waits for the file and its line; 0 if it doesn't appear.
  pid_t read_pid(const std::string& name) const;

 private:
  std::filesystem::path path_;
};

// {fsdp, "run", arguments...}
std::vector<std::string> fsdp_run(std::vector<std::string> arguments);

class Launched {
 public:
  // Runs `arguments`, a program and its arguments. In `environment`, "NAME=value" sets a variable
  // and "NAME" unsets one.
  explicit Launched(std::vector<std::string> arguments, std::vector<std::string> environment = {});
  ~Launched();
  Launched(const Launched&) = delete;
  Launched& operator=(const Launched&) = delete;

  pid_t pid() const { return pid_; }
  void signal(int signal) const;
  std::string out() const;
  std::string err() const;
  std::vector<std::string> out_lines() const;  // sorted, because ranks print in any order

  // Waits for the end and for all output. The exit code, or 128 + the signal that killed it; -1 if
  // that took longer than `limit`.
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

// What a program that has ended left behind.
struct Ended {
  int code = -1;
  std::string out, err;
};
Ended run_to_end(std::vector<std::string> arguments, std::vector<std::string> environment = {});

// Whether `text` contains `part`; a failure shows the text.
inline ::testing::AssertionResult has(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "no \"" << part << "\" in:\n" << text;
}

}  // namespace fsdp::launch
