// Writer: a queue in front of one of our output streams. Its reader may be slow or stuck (a pager,
// Ctrl-S). The launcher must still handle signals and reap ranks, so it never blocks in write().
//
// The descriptor's flags stay as they are: our shell shares it, and O_NONBLOCK would break the
// shell's output. Instead we write at most PIPE_BUF bytes after POLLOUT, which doesn't block on a
// pipe.
#pragma once

#include <cstddef>
#include <string>

namespace fsdp::launch {

class Writer {
 public:
  explicit Writer(int fd) : fd_(fd) {}
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  void push(std::string text);
  // Writes as much as it can without blocking. Once the reader is gone (EPIPE) or the stream fails,
  // all output is dropped and problem() returns the errno.
  void write_some();

  int fd() const { return fd_; }
  size_t pending() const { return queue_.size() - done_; }
  // The caller should stop reading from ranks. `room`: bytes more than usual that may wait.
  bool full(size_t room = 0) const { return pending() > kFull + room; }
  bool overfull() const { return pending() > kMost; }  // the caller should drop what isn't its own
  int problem() const { return problem_; }             // 0: none

 private:
  static constexpr size_t kFull = 1 << 20, kMost = 8 << 20;
  int fd_;
  std::string queue_;
  size_t done_ = 0;  // bytes at the front of queue_ that have been written
  int problem_ = 0;
};

// Whether both descriptors refer to the same file, pipe or terminal.
bool same_file(int one, int other);

}  // namespace fsdp::launch
