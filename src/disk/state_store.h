// StateStore: state that doesn't fit in memory, kept in a file and accessed through a few buffers.
//
// The state consists of entries, each a few tensors that are needed together. get() reads an entry
// into a buffer, put() writes it back in the background. The store learns the order of the gets: it
// reads ahead what followed an entry last time, as far as buffers allow. An entry that was never
// put holds zeros.
//
// Memory: `buffers` times the largest entry; nothing else grows with the state. Any thread may
// call; one call runs at a time. After an Error every later call throws the same one, since the
// contents of the file are unknown from then on.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "disk/engine.h"
#include "disk/file.h"
#include "fsdp/error.h"

namespace fsdp::disk {

struct StoreOptions {
  int buffers = 4;  // at least 2: one is in use while the others are read and written
  bool direct = true;
  EngineOptions engine = {};
};

struct StoreCounts {
  int64_t gets = 0;
  int64_t ahead = 0;  // gets whose read had started before the call
  int64_t bytes_read = 0, bytes_written = 0;
};

class StateStore {
 public:
  // entries[i]: the size in bytes of each of its tensors.
  StateStore(const std::string& directory, std::vector<std::vector<int64_t>> entries,
             const StoreOptions& options = {});
  StateStore(const StateStore&) = delete;
  StateStore& operator=(const StateStore&) = delete;

  // The entry's tensors; the pointers are valid until put(). At most `buffers` entries may be held
  // at a time.
  std::span<char* const> get(int entry);
  // Releases the entry. If `changed`, starts writing it.
  void put(int entry, bool changed = true);
  void flush();  // waits until everything that was put is in the file

  int64_t bytes_on_disk() const { return file_->bytes(); }
  int64_t bytes_in_memory() const { return memory_bytes_; }
  const ScratchFile& file() const { return *file_; }
  const char* engine() const { return engine_->name(); }
  StoreCounts counts() const;

 private:
  struct Entry {
    int64_t offset = 0;           // in the file
    int64_t bytes = 0;            // including the alignment of its tensors
    std::vector<int64_t> begins;  // of its tensors, relative to the entry
    int next = 0;                 // the entry that followed it last time
  };
  enum class State { kFree, kReading, kHeld, kWriting };  // a free buffer may still hold an entry
  struct Buffer {
    char* memory = nullptr;
    State state = State::kFree;
    int entry = -1;
    int64_t since = 0;  // clock_ when it entered its state
    Ticket ticket;
    std::vector<char*> tensors;
  };

  template <typename Work>
  auto guarded(Work work);  // runs `work` under the lock and remembers its failure
  const Entry& place(int entry) const FSDP_REQUIRES(mutex_);
  Buffer* holding(int entry) FSDP_REQUIRES(mutex_);
  Buffer* oldest(State state) FSDP_REQUIRES(mutex_);
  Buffer* free_one() FSDP_REQUIRES(mutex_);        // nullptr if there is none
  Buffer& claim(int entry) FSDP_REQUIRES(mutex_);  // waits for one
  void await(Buffer& buffer) FSDP_REQUIRES(mutex_);
  void collect() FSDP_REQUIRES(mutex_);  // frees the buffers of finished writes
  void read(Buffer& buffer, int entry) FSDP_REQUIRES(mutex_);
  void read_ahead(int entry) FSDP_REQUIRES(mutex_);
  void become(Buffer& buffer, State state) FSDP_REQUIRES(mutex_);

  int64_t memory_bytes_ = 0;  // of all buffers
  Memory memory_;             // backs all buffers
  std::unique_ptr<ScratchFile> file_;
  mutable Mutex mutex_;
  std::vector<Entry> entries_ FSDP_GUARDED_BY(mutex_);
  std::vector<Buffer> buffers_ FSDP_GUARDED_BY(mutex_);
  int last_ FSDP_GUARDED_BY(mutex_) = -1;      // the entry of the last get
  int64_t clock_ FSDP_GUARDED_BY(mutex_) = 0;  // counts changes of state
  StoreCounts counts_ FSDP_GUARDED_BY(mutex_);
  std::optional<Error> failure_ FSDP_GUARDED_BY(mutex_);
  std::unique_ptr<Engine> engine_;  // destroyed first: it uses the others
};

}  // namespace fsdp::disk
