// Liveness: whether the other processes of the world are still running, for backends whose own
// waits can't tell (mpi, nccl).
//
// A process on this host is watched directly; one on another host writes a heartbeat to the store.
// A rank that fails stores its reason for the others; a rank that ends stores a note saying so.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "base/process.h"
#include "comm/store.h"

namespace fsdp::comm {

class Liveness {
 public:
  // Collective over the world. Rank 0's process holds the store.
  Liveness(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
           std::chrono::milliseconds timeout);
  ~Liveness();

  // What is wrong with one of `ranks` ("rank 3 died (process 12 is gone)"), or "". It queries the
  // store, so it is meant for waits that have lasted a while.
  std::string trouble(const std::vector<int>& ranks);

  // "stopped by a signal" or similar if it is known, otherwise "".
  std::string condition(int rank) const;

  // Stores the reason for the other ranks. The first one stored stays.
  void fail(const std::string& why) noexcept;

  // post() stores a text under the communicator's name, posted() reads another rank's: at a timeout
  // they tell ranks that wait from ranks that never came.
  void post(const std::string& communicator, const std::string& text) noexcept;
  std::string posted(const std::string& communicator, int rank) noexcept;

  // For a timeout's message: which of `ranks` didn't post `expected`, and their condition.
  std::string who_is_missing(const std::string& communicator, const std::vector<int>& ranks,
                             const std::string& expected);

 private:
  struct Peer {
    bool here = false;  // on this host
    Process process;
  };
  struct Beat {
    std::string last;
    std::chrono::steady_clock::time_point changed;
  };
  void beat();
  void hold_store();

  BoundedStore store_;
  int rank_;
  std::chrono::milliseconds timeout_;
  std::vector<Peer> peers_;
  bool one_host_ = true;
  Mutex mutex_;
  std::vector<Beat> beats_ FSDP_GUARDED_BY(mutex_);  // of each rank
  Condition stop_;
  bool stopping_ FSDP_GUARDED_BY(mutex_) = false;
  std::thread heart_;  // runs only if ranks are on several hosts
};

}  // namespace fsdp::comm
