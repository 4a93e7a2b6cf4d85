#include "base/regular_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/file_error.h"
#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::base {
namespace {

constexpr int64_t kMostIfThere = int64_t{64} << 20;
constexpr size_t kLongestLine = size_t{16} << 20;
constexpr int64_t kReadAtOnce = int64_t{1} << 16;

const char* kind_of_file(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
  if (S_ISSOCK(mode)) return "a socket";
  return "not a regular file";
}

constexpr const char* kReadHint = "check the path and its permissions.";

}  // namespace

RegularFile::RegularFile(std::filesystem::path path) : path_(std::move(path)) {
  struct stat status {};
  // A socket can't be opened, so it is asked for first. What is there may change until it is open.
  const bool known = ::stat(path_.c_str(), &status) == 0;
  if (!known || !S_ISSOCK(status.st_mode)) {
    do {
      descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    } while (descriptor_ < 0 && errno == EINTR);
    if (descriptor_ < 0 || ::fstat(descriptor_, &status) < 0) {
      code_ = errno;
      problem_ = std::generic_category().message(code_);
    }
  }
  if (problem_.empty() && !S_ISREG(status.st_mode))
    problem_ = formatted("it is {}", kind_of_file(status.st_mode));
  if (!problem_.empty()) {
    if (descriptor_ >= 0) ::close(release());
    return;
  }
  size_ = status.st_size;
  // Some kinds of I/O give up with O_NONBLOCK where they would have to wait for the disk.
  const int flags = ::fcntl(descriptor_, F_GETFL);
  if (flags >= 0) ::fcntl(descriptor_, F_SETFL, flags & ~O_NONBLOCK);
}

RegularFile::~RegularFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

int RegularFile::release() {
  return std::exchange(descriptor_, -1);
}

const RegularFile& RegularFile::or_throw() const {
  if (!is_open())
    throw Error(formatted("can't read {}: {}.", path_, problem_),
                code_ != 0 ? file_hint(code_) : kReadHint);
  return *this;
}

size_t RegularFile::read(char* into, size_t size) const {
  ssize_t got = -1;
  do {
    got = ::read(descriptor_, into, size);
  } while (got < 0 && errno == EINTR);
  if (got < 0)
    throw Error(formatted("can't read {}: {}.", path_, std::generic_category().message(errno)),
                kReadHint);
  return static_cast<size_t>(got);
}

std::string read_file(const std::filesystem::path& path, int64_t at_most) {
  const RegularFile file(path);
  file.or_throw();
  std::string text;
  int64_t filled = 0, got = 0;
  do {
    // Files of /proc have the size 0, and others may grow.
    if (std::max(filled, file.size()) > at_most)
      throw Error(formatted("{} has more than {} bytes.", path, at_most),
                  "it isn't the kind of file that belongs here.");
    const auto all = static_cast<int64_t>(text.size());
    if (filled == all)
      text.resize(static_cast<size_t>(filled + std::max(file.size() - filled + 1, kReadAtOnce)));
    got = static_cast<int64_t>(
        file.read(text.data() + filled, text.size() - static_cast<size_t>(filled)));
    filled += got;
  } while (got > 0);
  text.resize(static_cast<size_t>(filled));
  return text;
}

std::string read_if_there(const std::filesystem::path& path) {
  try {
    return read_file(path, kMostIfThere);
  } catch (const Error&) {
    return "";
  }
}

bool LineReader::next(std::string& line) {
  line.clear();
  complete_ = false;
  bool any = false;
  while (!complete_) {
    if (used_ == part_.size()) {
      part_.resize(static_cast<size_t>(kReadAtOnce));
      used_ = 0;
      part_.resize(file_.read(part_.data(), part_.size()));
      if (part_.empty()) return any;
    }
    any = true;
    const std::string_view rest = std::string_view(part_).substr(used_);
    const std::string_view found = rest.substr(0, rest.find('\n'));
    line += found.substr(0, kLongestLine - std::min(line.size(), kLongestLine));
    complete_ = found.size() < rest.size();
    used_ += found.size() + (complete_ ? 1 : 0);
  }
  return true;
}

const std::filesystem::path& place_of_file(const std::filesystem::path& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode))
    throw Error(formatted("can't write {}: it is {}.", path, kind_of_file(status.st_mode)),
                "remove it, or choose another place.");
  return path;
}

}  // namespace fsdp::base
