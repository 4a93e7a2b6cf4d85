#include "comm/shm/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>

#include "base/file_error.h"
#include "base/format.h"
#include "base/mutex.h"
#include "base/table.h"
#include "fsdp/error.h"

namespace fsdp::comm::shm {
namespace {

// This process's mappings, by the memory they map. Two addresses for one memory would also be
// correct, but with one the thread sanitizer can follow ranks that are threads.
Mutex g_mutex;
std::map<ino_t, std::weak_ptr<Mapping>> g_mappings FSDP_GUARDED_BY(g_mutex);

ino_t inode_of(int descriptor) {
  struct stat info {};
  fstat(descriptor, &info);
  return info.st_ino;
}

[[noreturn]] void fail(const std::string& what, int64_t bytes, const std::string& hint) {
  throw Error(formatted("shared memory of {} for {}: {}.", human_bytes(static_cast<double>(bytes)),
                        what, std::strerror(errno)),
              hint);
}

}  // namespace

Mapping::Mapping(int descriptor, int64_t bytes, const std::string& what)
    : descriptor_(descriptor), inode_(inode_of(descriptor)), bytes_(bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (data == MAP_FAILED) {
    int problem = errno;
    close();
    errno = problem;
    fail(what, bytes, "use a smaller model, or raise the limit on address space (ulimit -v).");
  }
  data_ = static_cast<char*>(data);
  madvise(data_, bytes, MADV_HUGEPAGE);  // a hint; many kernels have no huge pages for memfd
}

Mapping::~Mapping() {
  if (data_) munmap(data_, bytes_);
  close();
  Lock lock(g_mutex);
  auto known = g_mappings.find(inode_);
  if (known != g_mappings.end() && known->second.expired()) g_mappings.erase(known);
}

std::shared_ptr<Mapping> Mapping::create(int64_t bytes, const std::string& what) {
  ignore_size_signal();  // ulimit -f limits shared memory, too
  int descriptor = memfd_create("fsdp", MFD_CLOEXEC);
  if (descriptor < 0) fail(what, bytes, "use Linux 3.17 or newer, which has memfd_create.");
  int problem;
  do {
    problem = posix_fallocate(descriptor, 0, bytes);
  } while (problem == EINTR);
  if (problem == EOPNOTSUPP || problem == EINVAL)
    problem = ftruncate(descriptor, bytes) == 0 ? 0 : errno;
  if (problem) {
    ::close(descriptor);
    errno = problem;
    fail(what, bytes,
         problem == EFBIG ? file_hint(problem)
                          : "free memory on this host, use more hosts, or a smaller model.");
  }
  std::shared_ptr<Mapping> mapping(new Mapping(descriptor, bytes, what));
  Lock lock(g_mutex);
  g_mappings[mapping->inode_] = mapping;
  return mapping;
}

std::shared_ptr<Mapping> Mapping::open(const Address& address, const std::string& what) {
  std::string path = formatted("/proc/{}/fd/{}", address.pid, address.descriptor);
  int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0)
    fail(formatted("{} ({})", what, path), address.bytes,
         "ranks must run as one user in one PID namespace; otherwise use the mpi or nccl backend.");
  Lock lock(g_mutex);
  std::weak_ptr<Mapping>& known = g_mappings[inode_of(descriptor)];
  if (auto mapping = known.lock()) {
    ::close(descriptor);
    return mapping;
  }
  std::shared_ptr<Mapping> mapping(new Mapping(descriptor, address.bytes, what));
  mapping->close();
  known = mapping;
  return mapping;
}

Address Mapping::address() const {
  return {getpid(), descriptor_, bytes_};
}

void Mapping::close() {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
}

}  // namespace fsdp::comm::shm
