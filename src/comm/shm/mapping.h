// Mapping: shared memory between processes of one host that leaves nothing behind.
//
// The memory is a memfd: it has no name, isn't subject to the size limit of /dev/shm, and the
// kernel frees it with the last process that maps it, even if SIGKILL ended them all. Other
// processes open it through /proc/PID/fd of the process that created it.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

namespace fsdp::comm::shm {

// Where a memfd can be opened, as long as its creator keeps it open.
struct Address {
  pid_t pid = 0;
  int descriptor = -1;
  int64_t bytes = 0;
};

class Mapping {
 public:
  // Allocates zeroed memory and reserves it, so that a lack of memory is an Error here, not a crash
  // later.
  static std::shared_ptr<Mapping> create(int64_t bytes, const std::string& what);
  // Maps another rank's memory. Ranks that are threads of one process share one mapping.
  static std::shared_ptr<Mapping> open(const Address& address, const std::string& what);
  ~Mapping();

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  Address address() const;  // valid until close()
  void close();             // no process can open it any more; the memory stays

  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

 private:
  Mapping(int descriptor, int64_t bytes, const std::string& what);

  int descriptor_;
  ino_t inode_;
  int64_t bytes_;
  char* data_ = nullptr;
};

}  // namespace fsdp::comm::shm
