#include "data/data_file.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/exit_code.h"
#include "base/file_error.h"
#include "base/format.h"
#include "base/regular_file.h"
#include "fsdp/error.h"

namespace fsdp::data {
namespace {

int open_to_read(const std::string& path, int64_t& size) {
  for (bool again = false;; again = true) {
    RegularFile file(path);
    if (file.code() != EMFILE || again) {
      size = file.or_throw().size();
      return file.release();
    }
    allow_many_files();
  }
}

// Half of the files that the process may have open are left to others.
bool may_stay_open(int handle) {
  rlimit limit{};
  return ::getrlimit(RLIMIT_NOFILE, &limit) == 0 &&
         static_cast<rlim_t>(handle) < limit.rlim_cur / 2;
}

}  // namespace

DataFile::DataFile(const std::string& path) : path_(path) {
  handle_ = open_to_read(path, size_);
  if (!may_stay_open(handle_)) ::close(std::exchange(handle_, -1));
}

DataFile::DataFile(const std::string& path, int64_t size) : DataFile(path) {
  size_ = size;
}

DataFile::~DataFile() {
  if (handle_ >= 0) ::close(handle_);
}

void DataFile::read(int64_t offset, void* into, int64_t bytes) const {
  int64_t size_now = 0;
  const int handle = handle_ >= 0 ? handle_ : open_to_read(path_, size_now);
  auto* to = static_cast<char*>(into);
  ssize_t got = 0;
  while (bytes > 0) {
    got = ::pread(handle, to, static_cast<size_t>(bytes), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    to += got;
    offset += got;
    bytes -= got;
  }
  const int code = errno;
  if (handle != handle_) ::close(handle);
  if (bytes == 0) return;
  if (got < 0)
    throw Error(formatted("can't read {} at byte {}: {}.", path_, offset, errno_text(code)),
                file_hint(code));
  throw CodedError(
      kExitDamaged,
      formatted(
          "{} was cut while it was in use: it had {} bytes, and ends at byte {} or before now.",
          path_, size_, offset),
      "don't change files while they are in use: restore it, and resume the run or start again.");
}

std::string DataFile::front(int64_t bytes) const {
  std::string text(static_cast<size_t>(std::min(bytes, size_)), '\0');
  read(0, text.data(), static_cast<int64_t>(text.size()));
  return text;
}

}  // namespace fsdp::data
