#include "disk/file.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <utility>

#include "base/file_error.h"
#include "base/format.h"
#include "base/seams.h"
#include "base/table.h"
#include "fsdp/error.h"

namespace fsdp::disk {
namespace {

std::atomic<int> opened = 0;  // files that this process has made so far

std::string sized(int64_t bytes) {
  return with_separators(bytes) + " bytes (" + human_bytes(static_cast<double>(bytes)) + ")";
}

int64_t free_bytes(int descriptor) {
  struct statvfs disk {};
  if (::fstatvfs(descriptor, &disk) < 0) return 0;
  return static_cast<int64_t>(disk.f_bavail) * static_cast<int64_t>(disk.f_frsize);
}

// Returns 0 or an errno. Checks RLIMIT_FSIZE first: exceeding it sends a signal that kills the
// process.
int allocate(int descriptor, int64_t bytes) {
  if (const int injected = ask_seam("allocate", 0)) return injected;
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      limit.rlim_cur < static_cast<rlim_t>(bytes))
    return EFBIG;
  // Checked first: some file systems allocate all remaining space before they report ENOSPC.
  if (free_bytes(descriptor) < bytes) return ENOSPC;
  int result = 0;
  do {
    result = ::fallocate(descriptor, 0, 0, bytes);
  } while (result < 0 && errno == EINTR);
  if (result == 0) return 0;
  // Some network file systems have no fallocate.
  if (errno != EOPNOTSUPP && errno != ENOSYS) return errno;
  return ::ftruncate(descriptor, bytes) == 0 ? 0 : errno;
}

}  // namespace

int ask_seam(const char* call, int64_t offset) {
  const auto& seam = seams().disk;
  return seam ? seam(call, offset) : 0;
}

ScratchFile::ScratchFile(const std::string& directory, int64_t bytes, bool direct)
    : directory_(directory.empty() ? "." : directory), bytes_(aligned(bytes)) {
  path_ = formatted("{}/.fsdp-states-{}-{}", directory_, ::getpid(), opened++);
  open(direct);
  try {
    reserve();
  } catch (...) {
    ::close(std::exchange(descriptor_, -1));
    throw;
  }
}

ScratchFile::~ScratchFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void ScratchFile::open(bool direct) {
  // A file of this name is left over from a process that had our PID and was killed between open
  // and unlink.
  ::unlink(path_.c_str());
  const int flags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC;
  if (direct) descriptor_ = ::open(path_.c_str(), flags | O_DIRECT, 0600);
  direct_ = descriptor_ >= 0;
  if (!direct_) {
    ::unlink(path_.c_str());  // some file systems create the file before they refuse O_DIRECT
    descriptor_ = ::open(path_.c_str(), flags, 0600);
  }
  const int code = errno;
  if (descriptor_ < 0)
    throw Error(formatted("{}: can't create a file for optimizer state here: {}.", directory_,
                          errno_text(code)),
                file_hint(code));
  ::unlink(path_.c_str());
}

void ScratchFile::reserve() const {
  const int code = allocate(descriptor_, bytes_);
  if (code == 0) return;
  const std::string wanted =
      formatted("{}: no room for {} of optimizer state", directory_, sized(bytes_));
  if (code == EFBIG)
    throw Error(formatted("{}: the file would exceed the size limit.", wanted),
                "raise the limit (ulimit -f unlimited), or use a file system for large files.");
  throw Error(formatted("{}: {}; {} are free, shared by all ranks that use this disk.", wanted,
                        errno_text(code), sized(free_bytes(descriptor_))),
              "free space, choose a directory on a larger disk, or offload a smaller part "
              "(Offload::fraction).");
}

}  // namespace fsdp::disk
