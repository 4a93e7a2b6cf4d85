// Group: the ranks of one host that share memory, and how they wait for each other.
//
// A control block lies in shared memory, one slot a rank, written by its owner only (but for the
// count of who sleeps on it). Each rank has a clock that counts the phases of its operations; an
// operation has the same phases on every rank, so "rank 2 has packed round 3" is "rank 2's clock
// has reached c". Ranks wait for clocks and for nothing else: a short spin, then a futex, in slices
// between which they look whether the others still live. Before the first phase of an operation a
// rank leaves its Description in its slot, and everybody compares before touching data.
//
// A failure (timeout, death of a peer, calls that differ) throws Error, breaks the group for good
// and is written into the slot, so that the other ranks fail with the same story at once.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/process.h"
#include "comm/core/description.h"
#include "comm/shm/mapping.h"

namespace fsdp::comm::shm {

// What one rank hands to another in one round of a staged operation: small enough that it is still
// in the writer's cache when the reader comes for it (measured: better than 128 KiB to 1 MiB).
inline constexpr int64_t kPartBytes = 64 << 10;

// Strings exchanged once, when a group is made. `get` waits until the key is there.
struct Exchange {
  std::function<void(const std::string& key, const std::string& value)> set;
  std::function<std::string(const std::string& key, std::chrono::milliseconds timeout)> get;
  std::function<std::string()> trouble = {};  // with a rank that may not come; "": none is known
};

struct Location {  // a tensor in memory that every rank has mapped
  int32_t window = -1;
  int64_t offset = 0;
};

struct Slot;  // one rank's part of the control block

class Group {
 public:
  // Collective over the ranks of the group; names a rank that does not come in time.
  Group(std::string name, int rank, int size, const Exchange& exchange,
        std::chrono::milliseconds timeout);
  ~Group();  // the other ranks learn that this one left

  const std::string& name() const { return name_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

  // Memory mapped by every rank, zeroed. Collective. Freed when every rank dropped it.
  std::shared_ptr<Mapping> allocate(int64_t bytes);
  // Where `data` lies for the other ranks, if it lies in allocated memory.
  Location locate(const void* data, int64_t bytes) const;
  // What `peer` located in the operation that runs, where this process has it; kept mapped.
  std::shared_ptr<char> resolve(int peer) const;
  bool one_location() const;  // whether all ranks located the same memory

  // --- phases of an operation, used by collectives.cpp ---
  // Starts an operation; the first round's staging buffer may be written after it.
  void begin(const Description& description, Location location = {});
  char* staging(int peer) const;  // `peer`'s buffer of the round that runs
  int64_t staging_bytes() const;
  void publish();    // this rank has done its phase; what it wrote is visible to who waits for it
  void await_all();  // until every rank has published as many phases as this one
  void leave_staging();  // this rank has read everybody's buffer of this round
  void next_round();     // turns to the other buffer, once everybody has left it

  // Ends the group for everybody with an Error about the operation that runs.
  [[noreturn]] void raise(const std::string& what, const std::string& hint);
  // The same without an Error, for a failure that is already one.
  void fail(const std::string& why) noexcept;
  // This rank gives up, from any thread: an operation that waits ends with an Error.
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
  bool compared_ = false;    // descriptions of the operation that runs
  int buffer_ = 0;           // staging buffer of the round that runs
  uint32_t released_[2];     // clock at which everybody has left staging buffer 0, 1
  bool yields_;              // while spinning

  mutable std::mutex windows_mutex_;
  int32_t next_window_ = 0;
  std::map<int32_t, std::weak_ptr<Mapping>> windows_;
  std::map<const char*, int32_t> windows_by_address_;
};

}  // namespace fsdp::comm::shm
