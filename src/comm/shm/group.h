// Group: the ranks of one host that share memory, and how they wait for each other.
//
// A control block in shared memory has one slot per rank, written only by its owner (except the
// count of ranks that sleep on it). Each rank has a clock that counts the phases of its operations.
// An operation has the same phases on every rank, so "rank 2 has packed round 3" means "rank 2's
// clock has reached c". Ranks wait only for clocks: they spin briefly, then sleep on a futex in
// slices and check between slices that the others are alive. Before the first phase of an operation
// a rank posts its Description in its slot, and all ranks compare them before touching data.
//
// A failure (timeout, dead peer, different calls) throws an Error, breaks the group for good and is
// written into the slot, so that the other ranks fail at once with the same reason.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/exit_code.h"
#include "base/mutex.h"
#include "base/process.h"
#include "comm/core/description.h"
#include "comm/shm/mapping.h"

namespace fsdp::comm::shm {

// What one rank passes to another in one round of a staged operation: small enough to still be in
// the writer's cache when the reader gets to it (measured: better than 128 KiB to 1 MiB).
inline constexpr int64_t kPartBytes = 64 << 10;

// Strings exchanged once, while a group is created. `get` waits until the key is set.
struct Exchange {
  std::function<void(const std::string& key, const std::string& value)> set;
  std::function<std::string(const std::string& key, std::chrono::milliseconds timeout)> get;
  std::function<std::string()> trouble = {};  // why a rank may not come; "" if unknown
};

struct Location {  // a tensor in memory that every rank has mapped
  int32_t window = -1;
  int64_t offset = 0;
};

struct Slot;  // one rank's part of the control block

class Group {
 public:
  // Collective over the ranks of the group; the Error names a rank that doesn't come in time.
  Group(std::string name, int rank, int size, const Exchange& exchange,
        std::chrono::milliseconds timeout);
  ~Group();  // tells the other ranks that this one left

  const std::string& name() const { return name_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

  // Memory mapped by every rank, zeroed. Collective. Freed when every rank has dropped it.
  std::shared_ptr<Mapping> allocate(int64_t bytes);
  // Where the other ranks find `data`, if it is in allocated memory.
  Location locate(const void* data, int64_t bytes) const;
  // This process's address of what `peer` located in the current operation; keeps it mapped.
  std::shared_ptr<char> resolve(int peer) const;
  bool one_location() const;  // whether all ranks located the same memory

  // --- phases of an operation, used by collectives.cpp ---
  // Starts an operation; the first round's staging buffer may be written afterwards.
  void begin(const Description& description, Location location = {});
  char* staging(int peer) const;  // `peer`'s buffer of the current round
  int64_t staging_bytes() const;
  void publish();        // ends this rank's phase; its writes are visible to ranks that await it
  void await_all();      // until every rank has published as many phases as this one
  void leave_staging();  // this rank has read every rank's buffer of this round
  void next_round();     // switches to the other buffer, once every rank has left it

  // Breaks the group for every rank and throws an Error about the current operation.
  [[noreturn]] void raise(const std::string& what, const std::string& hint, ExitCode code);
  // The same without throwing, for a failure that already has its Error.
  void fail(const std::string& why) noexcept;
  // Gives up this rank, from any thread: an operation that waits ends with an Error.
  void abandon() noexcept;

 private:
  void join(const Exchange& exchange);
  void await(int peer, uint32_t clock);
  struct Trouble;
  Trouble look_around(int awaited, std::chrono::steady_clock::time_point started) const;
  void compare_descriptions();
  std::string describe_peer(int peer) const;
  Slot& slot(int rank) const;

  std::string name_;
  int rank_;
  int size_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<Mapping> control_;
  std::vector<Process> processes_;
  std::string broken_;  // why; empty while it works
  std::atomic<bool> abandoned_{false};
  std::function<std::string()> trouble_;  // Exchange's, while joining

  uint32_t clock_;           // of this rank
  uint64_t operations_ = 0;  // begun
  bool compared_ = false;    // descriptions of the current operation
  int buffer_ = 0;           // staging buffer of the current round
  uint32_t released_[2];     // clock at which every rank has left staging buffer 0, 1
  bool yields_;              // while spinning

  mutable Mutex windows_mutex_;
  int32_t next_window_ FSDP_GUARDED_BY(windows_mutex_) = 0;
  std::map<int32_t, std::weak_ptr<Mapping>> windows_ FSDP_GUARDED_BY(windows_mutex_);
  std::map<const char*, int32_t> windows_by_address_ FSDP_GUARDED_BY(windows_mutex_);
};

}  // namespace fsdp::comm::shm
