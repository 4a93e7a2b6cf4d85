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
  int64_t bytes_in_memory() const;
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
  const Entry& place(int entry) const;
  Buffer* holding(int entry);
  Buffer* oldest(State state);
  Buffer* free_one();        // nullptr if there is none
  Buffer& claim(int entry);  // waits for one
  void await(Buffer& buffer);
  void collect();  // frees the buffers of finished writes
  void read(Buffer& buffer, int entry);
  void read_ahead(int entry);
  void become(Buffer& buffer, State state);

  std::vector<Entry> entries_;
  int64_t buffer_bytes_ = 0;
  std::unique_ptr<char, void (*)(char*)> memory_;  // backs all buffers
  std::unique_ptr<ScratchFile> file_;
  std::vector<Buffer> buffers_;
  mutable std::mutex mutex_;
  int last_ = -1;      // the entry of the last get
  int64_t clock_ = 0;  // counts changes of state
  StoreCounts counts_;
  std::optional<Error> failure_;
  std::unique_ptr<Engine> engine_;  // destroyed first: it uses the others
};

}  // namespace fsdp::disk
