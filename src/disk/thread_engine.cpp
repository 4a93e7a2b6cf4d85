// The thread engine: each thread takes a piece and calls pread or pwrite until it is done.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <thread>

#include "disk/engine.h"

namespace fsdp::disk {
namespace {

// Drops a finished piece from the page cache: nothing reads it before the next step, and the memory
// is needed elsewhere. Dirty pages can't be dropped, so they are written first, which also reports
// disk errors. Returns false on such an error, with errno set.
bool forget(int file, bool reading, int64_t offset, int64_t bytes) {
  const unsigned written =
      SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
  if (!reading && ::sync_file_range(file, offset, bytes, written) < 0 &&
      (errno == EIO || errno == ENOSPC || errno == EDQUOT))
    return false;
  ::posix_fadvise(file, offset, bytes, POSIX_FADV_DONTNEED);
  return true;
}

class ThreadEngine final : public Engine {
 public:
  ThreadEngine(const OpenFile& file, const EngineOptions& options) : Engine(file, options) {
    for (int i = 0; i < options.threads; ++i) threads_.emplace_back([this] { run(); });
  }

  // Drops pieces that haven't started.
  ~ThreadEngine() override {
    {
      const Lock lock(mutex_);
      stopping_ = true;
      queue_.clear();
    }
    more_.notify_all();
    for (std::thread& thread : threads_) thread.join();  // Ends: with the call it is in
  }

  const char* name() const override { return "threads"; }

 private:
  void wake() override { more_.notify_all(); }

  int64_t run_piece(const Piece& piece) const {
    return transfer_once(file_, piece.ticket->direction, piece.offset, piece.memory, piece.bytes);
  }

  void run() {
    for (Piece piece;;) {
      {
        Lock lock(mutex_);
        // Ends: the destructor.
        more_.wait(lock, [&]() FSDP_REQUIRES(mutex_) { return stopping_ || !queue_.empty(); });
        if (stopping_) return;
      }
      if (!take(piece)) continue;  // another thread was faster
      while (!finish(piece, run_piece(piece))) continue;
      piece = {};  // keep no transfer alive while we sleep
    }
  }

  Condition more_;
  bool stopping_ FSDP_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;  // last: they use the other members
};

}  // namespace

int64_t transfer_once(const OpenFile& file, Direction direction, int64_t offset, char* memory,
                      int64_t bytes) {
  const bool reading = direction == Direction::kRead;
  const auto size = static_cast<size_t>(bytes);
  const ssize_t result = reading ? ::pread(file.descriptor, memory, size, offset)
                                 : ::pwrite(file.descriptor, memory, size, offset);
  if (result < 0) return -errno;
  return file.direct || forget(file.descriptor, reading, offset, result) ? result : -errno;
}

std::unique_ptr<Engine> make_thread_engine(const OpenFile& file, const EngineOptions& options) {
  return std::make_unique<ThreadEngine>(file, options);
}

}  // namespace fsdp::disk
