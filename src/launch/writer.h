// Writer: a queue in front of one of our output streams. Whoever reads us may be slow or stuck (a
// pager, Ctrl-S); the launcher must still hear signals and reap ranks, so it never blocks in
// write().
//
// The descriptor keeps its flags: it is shared with our shell, where O_NONBLOCK would do harm. A
// write of at most PIPE_BUF bytes after POLLOUT does not block on a pipe, and that is what is used.
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
  // Writes as much as goes without blocking. Once the reader is gone (EPIPE) or the stream fails,
  // everything is dropped and problem() is its errno.
  void write_some();

  int fd() const { return fd_; }
  size_t pending() const { return queue_.size() - done_; }
  bool full() const { return pending() > kFull; }  // time to stop reading from ranks
  int problem() const { return problem_; }         // 0: none

 private:
  static constexpr size_t kFull = 1 << 20;
  int fd_;
  std::string queue_;
  size_t done_ = 0;  // bytes at the front of queue_ that are written
  int problem_ = 0;
};

// True when both descriptors lead to the same file, pipe or terminal.
bool same_file(int one, int other);

}  // namespace fsdp::launch
