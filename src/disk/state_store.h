// StateStore: state that does not fit into memory, in a file, with a few buffers that what is
// worked on goes through.
//
// The state comes in entries, each of a few tensors that are needed together. get() brings an entry
// into a buffer, put() writes it back behind the caller's back. The order of the gets is learned:
// what came after an entry the last time is read ahead, as far as there are buffers. An entry that
// was never put holds zeros.
//
// Memory: `buffers` times the largest entry, and nothing else that grows with the state. Any thread
// may call; one call runs at a time. After an Error every further call throws the same one, since
// nobody knows what is on the disk then.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "disk/engine.h"
#include "disk/file.h"
#include "fsdp/error.h"

namespace fsdp::disk {

struct StoreOptions {
  int buffers = 4;  // at least 2: one is worked on, the others are read into and written from
  bool direct = true;
  EngineOptions engine = {};
};

struct StoreCounts {
  int64_t gets = 0;
  int64_t ahead = 0;  // of these, what was read or being read before it was asked for
  int64_t bytes_read = 0, bytes_written = 0;
};

class StateStore {
 public:
  // entries[i]: the bytes of each of its tensors.
  StateStore(const std::string& directory, std::vector<std::vector<int64_t>> entries,
             const StoreOptions& options = {});
  StateStore(const StateStore&) = delete;
  StateStore& operator=(const StateStore&) = delete;

  // Where the entry's tensors are, from now until put(). At most `buffers` may be held at a time.
  std::span<char* const> get(int entry);
  // Gives it back. changed: it is written, which has begun when this returns.
  void put(int entry, bool changed = true);
  void flush();  // until everything that was put is in the file

  int64_t bytes_on_disk() const { return file_->bytes(); }
  int64_t bytes_in_memory() const;
  const ScratchFile& file() const { return *file_; }
  const char* engine() const { return engine_->name(); }
  StoreCounts counts() const;

 private:
  struct Entry {
    int64_t offset = 0;           // in the file
    int64_t bytes = 0;            // with what aligns its tensors
    std::vector<int64_t> begins;  // of its tensors, from its own begin on
    int next = 0;                 // what followed it last time
  };
  enum class State { kFree, kReading, kHeld, kWriting };  // a free one may hold an entry
  struct Buffer {
    char* memory = nullptr;
    State state = State::kFree;
    int entry = -1;
    int64_t since = 0;  // when it came into its state, in calls
    Ticket ticket;
    std::vector<char*> tensors;
  };

  template <typename Work>
  auto guarded(Work work);  // under the lock, with failures kept
  const Entry& place(int entry) const;
  Buffer* holding(int entry);
  Buffer* oldest(State state);
  Buffer* free_one();        // nullptr when there is none
  Buffer& claim(int entry);  // waits for one
  void await(Buffer& buffer);
  void collect();  // writes that have ended
  void read(Buffer& buffer, int entry);
  void read_ahead(int entry);
  void become(Buffer& buffer, State state);

  std::vector<Entry> entries_;
  int64_t buffer_bytes_ = 0;
  std::unique_ptr<char, void (*)(char*)> memory_;  // of all buffers
  std::unique_ptr<ScratchFile> file_;
  std::vector<Buffer> buffers_;
  mutable std::mutex mutex_;
  int last_ = -1;  // entry that was asked for
  int64_t clock_ = 0;
  StoreCounts counts_;
  std::optional<Error> failure_;
  std::unique_ptr<Engine> engine_;  // first to go: it uses the others
};

}  // namespace fsdp::disk
