#include "launch/writer.h"

#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

namespace fsdp::launch {

void Writer::push(std::string text) {
  if (problem_) return;
  if (pending() == 0) {
    queue_ = std::move(text);
    done_ = 0;
  } else {
    queue_ += text;
  }
}

void Writer::write_some() {
  while (pending() > 0) {
    pollfd ready{fd_, POLLOUT, 0};
    int count = poll(&ready, 1, 0);
    if (count == 0 || (count < 0 && errno == EINTR)) break;
    size_t size = std::min<size_t>(pending(), PIPE_BUF);
    // End a chunk at a line end if possible, so that other writers to the same file interleave
    // whole lines.
    if (size < pending()) {
      size_t end = queue_.rfind('\n', done_ + size - 1);
      if (end != std::string::npos && end >= done_) size = end + 1 - done_;
    }
    ssize_t written = write(fd_, queue_.data() + done_, size);
    if (written >= 0) {
      done_ += written;
    } else if (errno == EAGAIN) {
      break;
    } else if (errno != EINTR) {
      problem_ = errno;
      queue_.clear();
      done_ = 0;
    }
  }
  if (done_ > kFull) {
    queue_.erase(0, done_);
    done_ = 0;
  }
}

bool same_file(int one, int other) {
  struct stat first, second;
  return fstat(one, &first) == 0 && fstat(other, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino;
}

}  // namespace fsdp::launch
