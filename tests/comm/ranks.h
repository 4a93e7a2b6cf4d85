// Starts real ranks for tests: plain processes with torchrun's variables, or mpirun.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "free_port.h"

namespace fsdp::testing {

namespace fs = std::filesystem;

class Ranks {
 public:
  using Environment = std::map<std::string, std::string>;

  Ranks() {
    std::string pattern = (fs::temp_directory_path() / "fsdp-ranks-XXXXXX").string();
    dir_ = mkdtemp(pattern.data());
  }
  ~Ranks() {
    kill_all(SIGKILL);
    for (pid_t pid : pids_) waitpid(pid, nullptr, 0);
    fs::remove_all(dir_);
  }

  // `size` processes of `command`, without a launcher that would end the others when one fails.
  // What `environment` already has stays: LOCAL_WORLD_SIZE=1 makes them meet as on several hosts.
  void start(int size, const std::vector<std::string>& command, Environment environment) {
    environment["MASTER_ADDR"] = "127.0.0.1";
    environment.emplace("MASTER_PORT", std::to_string(free_port()));
    for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"})
      environment.emplace(name, std::to_string(size));
    for (int rank = 0; rank < size; ++rank) {
      environment["RANK"] = std::to_string(rank);
      environment["LOCAL_RANK"] =
          environment["LOCAL_WORLD_SIZE"] == "1" ? "0" : std::to_string(rank);
      start_one(command, environment);
    }
  }

  // One process in its own process group, with stderr in the folder.
  pid_t start_one(std::vector<std::string> command, Environment environment) {
    environment["FSDP_TEST_DIR"] = dir_;
    environment.emplace("OMP_NUM_THREADS", "1");
    environment.emplace("FSDP_FLIGHT_DIR", dir_ + "/flight");
    pid_t pid = fork();
    if (pid == 0) {
      setpgid(0, 0);
      for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
      std::string log = dir_ + "/log-" + std::to_string(getpid());
      if (!freopen(log.c_str(), "w", stderr)) _exit(127);
      if (dup2(2, 1) < 0) _exit(127);
      std::vector<char*> words;
      for (auto& word : command) words.push_back(word.data());
      words.push_back(nullptr);
      execvp(words[0], words.data());
      _exit(127);
    }
    setpgid(pid, pid);
    pids_.push_back(pid);
    return pid;
  }

  // A rank's result; waits for it. Fails the test if none comes for a long time.
  std::string result(int rank) {
    std::string path = dir_ + "/rank-" + std::to_string(rank);
    for (int i = 0; i < 6000; ++i) {
      bool last_look = nothing_runs();
      if (fs::exists(path)) {
        std::ifstream file(path);
        std::stringstream text;
        text << file.rdbuf();
        return text.str();
      }
      if (last_look) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    ADD_FAILURE() << "rank " << rank << " wrote no result\n" << logs();
    return "";
  }

  std::string logs() {
    std::string all;
    for (const auto& entry : fs::directory_iterator(dir_)) {
      if (!entry.path().filename().string().starts_with("log-")) continue;
      std::ifstream file(entry.path());
      all.append(std::istreambuf_iterator<char>(file), {}).append("\n");
    }
    return all;
  }

  void kill_all(int signal) {
    for (pid_t pid : pids_) kill(-pid, signal);
  }

  int wait_for(pid_t pid) {
    int status = 0;
    waitpid(pid, &status, 0);
    std::erase(pids_, pid);
    return status;
  }

  const std::string& dir() const { return dir_; }
  const std::vector<pid_t>& pids() const { return pids_; }

 private:
  bool nothing_runs() const {
    for (pid_t pid : pids_) {
      siginfo_t info{};
      if (waitid(P_PID, pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == 0)
        return false;
    }
    return true;
  }

  std::string dir_;
  std::vector<pid_t> pids_;
};

// The nccl cases run on machines with a GPU, if the CUDA library was built.
inline bool has_gpu() {
#ifdef FSDP_TEST_CUDA
  return access("/dev/nvidia0", F_OK) == 0;
#else
  return false;
#endif
}

// mpirun that lets the others continue when one rank dies, so that their errors can be seen.
inline std::vector<std::string> mpirun(int size) {
  return {"mpirun", "--allow-run-as-root", "--oversubscribe", "--enable-recovery",
          "-n",     std::to_string(size)};
}

}  // namespace fsdp::testing
