// Engine: reads and writes many pieces of a file concurrently, into and out of the caller's memory.
//
// A transfer is cut into pieces of a few megabytes. Up to `depth` pieces are in flight, started in
// the order of the calls. There are two engines: io_uring, and threads that call pread and pwrite.
// The thread engine is for kernels and containers without io_uring, and for files in the page cache
// (which io_uring would hand to kernel threads anyway); it asks the kernel to drop the pages of
// each finished piece.
//
// A short read or write is continued. A failure makes wait() throw an Error with the file, the
// offset and the system's message.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "disk/file.h"

namespace fsdp::disk {

enum class Direction { kRead, kWrite };

struct EngineOptions {
  int64_t piece = 2 << 20;                 // bytes; a multiple of kAlignment
  int depth = 32;                          // pieces in flight
  bool uring = true;                       // false: threads, even if io_uring works
  int threads = 8;                         // of the thread engine
  std::chrono::milliseconds limit{60000};  // wait() throws after this long without progress
};

// A read or write in flight. Made by Engine::start; only the engine touches its fields, all but the
// first three under its mutex.
struct Transfer {
  Direction direction;
  int64_t offset, bytes;
  int64_t left;         // bytes not yet transferred
  int64_t pieces;       // unfinished pieces
  std::string problem;  // message of the first piece that failed
  std::string hint;
};
using Ticket = std::shared_ptr<Transfer>;

class Engine {
 public:
  virtual ~Engine() = default;

  // Reads or writes `bytes` at `offset`. Returns at once; the memory must stay valid until wait()
  // has returned or done() is true. Any thread may call it.
  Ticket start(Direction direction, int64_t offset, char* memory, int64_t bytes)
      FSDP_EXCLUDES(mutex_);
  // Waits until the transfer has ended; throws if it failed. After a timeout the transfer goes on.
  void wait(const Ticket& ticket) FSDP_EXCLUDES(mutex_);
  // Also true on failure; wait() then throws at once.
  bool done(const Ticket& ticket) FSDP_EXCLUDES(mutex_);

  virtual const char* name() const = 0;  // "io_uring" or "threads"
  const EngineOptions& options() const { return options_; }

 protected:
  struct Piece {
    Ticket ticket;
    int64_t offset;
    char* memory;
    int64_t bytes;
  };

  Engine(OpenFile file, const EngineOptions& options) : file_(std::move(file)), options_(options) {}

  // Called after pieces were added to the queue.
  virtual void wake() FSDP_EXCLUDES(mutex_) = 0;
  // Records the result of a piece: bytes, or a negative errno. Returns false if part of the piece
  // is left; `piece` is then that remainder and must be run again.
  bool finish(Piece& piece, int64_t result) FSDP_EXCLUDES(mutex_);
  // Pops the front of the queue; false if it is empty.
  bool take(Piece& piece) FSDP_EXCLUDES(mutex_);

  const OpenFile file_;
  const EngineOptions options_;
  Mutex mutex_;
  Condition ended_;  // a piece has ended
  std::deque<Piece> queue_ FSDP_GUARDED_BY(mutex_);

 private:
  void fail(Piece& piece, const std::string& why, const std::string& hint) FSDP_EXCLUDES(mutex_);
  int64_t finished_ FSDP_GUARDED_BY(mutex_) = 0;  // pieces
};

// Memory for transfers, in huge pages: the disk's throughput is then twice that of small ones. Null
// if there isn't enough.
using Memory = std::unique_ptr<char, void (*)(char*)>;
Memory huge_pages(int64_t bytes);

// io_uring if it works, else threads. `memory` holds the buffers that most transfers use; they are
// registered with the kernel once. The file must stay open while the engine lives.
std::unique_ptr<Engine> make_engine(const OpenFile& file, const EngineOptions& options,
                                    std::span<const std::span<char>> memory);

// One call of pread or pwrite that leaves nothing in the page cache. Returns bytes, or a negative
// errno.
int64_t transfer_once(const OpenFile& file, Direction direction, int64_t offset, char* memory,
                      int64_t bytes);

// Why io_uring can't be used here; empty if it can.
std::string why_no_uring();

// For make_engine. make_uring_engine returns nullptr if io_uring doesn't work.
std::unique_ptr<Engine> make_uring_engine(const OpenFile& file, const EngineOptions& options,
                                          std::span<const std::span<char>> memory);
std::unique_ptr<Engine> make_thread_engine(const OpenFile& file, const EngineOptions& options);

}  // namespace fsdp::disk
