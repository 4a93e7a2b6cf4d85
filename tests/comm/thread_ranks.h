// Ranks as threads of one process: the fastest world for tests of what ranks compute together.
#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/shm/group.h"

namespace fsdp::testing {

// An in-process store, for groups that don't need LibTorch.
class LocalExchange {
 public:
  comm::shm::Exchange exchange() {
    return {[this](const std::string& key, const std::string& value) {
              std::lock_guard lock(mutex_);
              values_[key] = value;
              changed_.notify_all();
            },
            [this](const std::string& key, std::chrono::milliseconds timeout) {
              std::unique_lock lock(mutex_);
              changed_.wait_for(lock, timeout, [&] { return values_.count(key) > 0; });
              return values_[key];
            }};
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

// Runs body(rank) on `size` threads; returns each rank's error text ("" for none).
inline std::vector<std::string> run_ranks(int size, const std::function<void(int)>& body) {
  std::vector<std::string> errors(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& failure) {
        errors[rank] = failure.what();
      }
    });
  for (auto& thread : threads) thread.join();
  return errors;
}

inline void expect_no_errors(const std::vector<std::string>& errors) {
  for (size_t rank = 0; rank < errors.size(); ++rank)
    EXPECT_EQ(errors[rank], "") << "rank " << rank;
}

}  // namespace fsdp::testing
