// An in-memory file with a path under which it can be opened.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string>

namespace fsdp::fuzz {

class MemoryFile {
 public:
  MemoryFile() : file_(::memfd_create("fuzzed", MFD_CLOEXEC)) {
    if (file_ < 0) std::abort();
  }
  ~MemoryFile() { ::close(file_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  std::string path() const { return "/proc/self/fd/" + std::to_string(file_); }
  void fill(const uint8_t* data, size_t size) {
    if (::ftruncate(file_, 0) < 0 || ::ftruncate(file_, static_cast<off_t>(size)) < 0 ||
        ::pwrite(file_, data, size, 0) != static_cast<ssize_t>(size))
      std::abort();
  }

 private:
  int file_;
};

}  // namespace fsdp::fuzz
