// Engine: many pieces of a file read and written at the same time, into and out of memory of the
// caller.
//
// A transfer is cut into pieces of a few megabytes, `depth` of which are under way at a time, in
// the order they were started. There are two engines: io_uring, and threads that call pread and
// pwrite. The second is for kernels and containers that have or allow no io_uring, and for files
// that go through the page cache (which io_uring would give to threads of the kernel anyway); it
// asks the kernel to keep none of what has gone through.
//
// A piece that comes back short is continued; what fails makes an Error with file, offset and the
// system's words in wait().
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "disk/file.h"

namespace fsdp::disk {

enum class Direction { kRead, kWrite };

struct EngineOptions {
  int64_t piece = 2 << 20;                 // bytes; a multiple of kAlignment
  int depth = 32;                          // pieces under way
  bool uring = true;                       // false: threads, also where io_uring works
  int threads = 8;                         // of the engine that has them
  std::chrono::milliseconds limit{60000};  // a wait without any progress for so long is an Error
};

// Something that was started. Made by Engine::start; its fields are the engine's.
struct Transfer {
  Direction direction;
  int64_t offset, bytes;
  int64_t left;         // bytes that have not come yet
  int64_t pieces;       // that have not ended yet
  std::string problem;  // of the first piece that failed
  std::string hint;
};
using Ticket = std::shared_ptr<Transfer>;

class Engine {
 public:
  virtual ~Engine() = default;

  // Reads or writes `bytes` at `offset`. Returns at once; the memory must stay until wait() has
  // returned or done() is true. Any thread.
  Ticket start(Direction direction, int64_t offset, char* memory, int64_t bytes);
  // Until it has ended. Throws what went wrong. After a timeout the transfer still goes on.
  void wait(const Ticket& ticket);
  bool done(const Ticket& ticket);  // true too when it failed: wait() says so, without waiting

  virtual const char* name() const = 0;  // "io_uring" or "threads"
  const EngineOptions& options() const { return options_; }

 protected:
  struct Piece {
    Ticket ticket;
    int64_t offset;
    char* memory;
    int64_t bytes;
  };

  Engine(const ScratchFile& file, const EngineOptions& options) : file_(file), options_(options) {}

  // Called without the lock after pieces were added to the queue.
  virtual void wake() = 0;
  // What became of a piece: `result` bytes, or a negative errno. False when the piece has a rest
  // that must be run again (it was changed to that). Called without the lock.
  bool finish(Piece& piece, int64_t result);
  // The first of the queue; false when there is none.
  bool take(Piece& piece);

  const ScratchFile& file_;
  const EngineOptions options_;
  std::mutex mutex_;
  std::condition_variable ended_;  // a piece has ended
  std::deque<Piece> queue_;

 private:
  void fail(Piece& piece, const std::string& why, const std::string& hint);
  int64_t finished_ = 0;  // pieces; under the lock
};

// io_uring where it works, else threads. `memory` holds what will be read into and written from
// most: it is registered with the kernel once. The file must outlive the engine.
std::unique_ptr<Engine> make_engine(const ScratchFile& file, const EngineOptions& options,
                                    std::span<const std::span<char>> memory);

// One call of pread or pwrite, and nothing left in the page cache. Bytes, or a negative errno.
int64_t transfer_once(const ScratchFile& file, Direction direction, int64_t offset, char* memory,
                      int64_t bytes);

// Why io_uring cannot be used here; empty when it can.
std::string why_no_uring();

// The two, for make_engine. The first is nullptr where io_uring does not work.
std::unique_ptr<Engine> make_uring_engine(const ScratchFile& file, const EngineOptions& options,
                                          std::span<const std::span<char>> memory);
std::unique_ptr<Engine> make_thread_engine(const ScratchFile& file, const EngineOptions& options);

}  // namespace fsdp::disk
