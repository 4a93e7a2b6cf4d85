#include "checkpoint/draft_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/file_error.h"
#include "base/format.h"
#include "base/printable.h"
#include "base/process.h"
#include "base/regular_file.h"
#include "fsdp/error.h"

namespace fsdp::checkpoint {
namespace {

namespace fs = std::filesystem;
using files::Path;

constexpr const char* kLock = ".lock";
constexpr size_t kLongestOwner = 200;  // bytes

Path lock_of(const Path& draft) {
  return draft.parent_path() / (draft.filename().string() + kLock);
}

bool is_there(const Path& path) {
  std::error_code problem;
  return fs::symlink_status(path, problem).type() != fs::file_type::not_found;
}

}  // namespace

DraftLock::DraftLock(Path draft) : draft_(std::move(draft)), path_(lock_of(draft_)) {
  while (!open_file() || !lock()) {  // Ends: each time, another process has just finished
  }
  if (created_ && is_there(draft_)) {
    ::unlink(path_.c_str());
    ::close(handle_);
    refuse("is in the way, and no process of ours has left it behind",
           "move or remove it if it isn't needed, or choose another name.");
  }
  write_owner();
}

DraftLock::~DraftLock() {
  if (is_held()) ::unlink(path_.c_str());
  ::close(handle_);
}

void DraftLock::check() const {
  if (!is_held())
    refuse("can't be published: its lock file was removed while it was written",
           "leave the files of a command alone while it runs, and start it again.");
}

bool DraftLock::open_file() {
  constexpr int kFlags = O_RDWR | O_CLOEXEC;
  const Path& place = place_of_file(path_);
  handle_ = ::open(place.c_str(), kFlags | O_CREAT | O_EXCL, 0666);
  created_ = handle_ >= 0;
  if (created_) return true;
  if (errno == EEXIST) handle_ = ::open(place.c_str(), kFlags);
  if (handle_ >= 0) return true;
  if (errno == ENOENT) return false;
  const int code = errno;
  if ((code == EACCES || code == EPERM) && is_there(path_))
    refuse(formatted("belongs to another user: {} has begun it", owner()),
           "wait until it is done, or choose another name; a leftover only its owner can remove.");
  throw Error(formatted("{}: can't be created: {}.", path_, errno_text(code)), file_hint(code));
}

bool DraftLock::lock() {
  int code = files::ask_seam("flock", path_);
  if (code == 0 && ::flock(handle_, LOCK_EX | LOCK_NB) != 0) code = errno;
  if (code == 0) {
    if (is_held()) return true;
    ::close(handle_);  // its owner has removed it since
    return false;
  }
  const bool held = code == EWOULDBLOCK;
  if (!held && created_) return true;
  ::close(handle_);
  if (held)
    refuse(formatted("is being written by {}", owner()),
           "wait until that is done, or choose another name.");
  refuse(formatted("was begun by {}, and this file system can't tell whether that still runs",
                   owner()),
         formatted("if it doesn't, remove it and {}; or choose another name.", path_.filename()));
}

bool DraftLock::is_held() const {
  struct stat ours {
  }, there{};
  return ::fstat(handle_, &ours) == 0 && ::lstat(path_.c_str(), &there) == 0 &&
         ours.st_ino == there.st_ino && ours.st_dev == there.st_dev;
}

// For messages only: a text that can't be written or read doesn't matter.
void DraftLock::write_owner() const {
  const std::string text = formatted("process {} on {}\n", ::getpid(), host_name());
  if (::ftruncate(handle_, 0) == 0) [[maybe_unused]]
    const ssize_t ignored = ::pwrite(handle_, text.data(), text.size(), 0);
}

std::string DraftLock::owner() const {
  std::string text = read_if_there(path_).substr(0, kLongestOwner);
  text.resize(std::min(text.find('\n'), text.size()));
  return text.empty() ? "another process" : printable(text);
}

void DraftLock::refuse(const std::string& what, const std::string& hint) const {
  throw Error(formatted("{}: {}.", draft_, what), hint);
}

bool is_draft(const Path& path) {
  const std::string name = path.filename().string();
  return name.ends_with(std::string(".partial") + kLock) ||
         (name.ends_with(".partial") && is_there(lock_of(path)));
}

}  // namespace fsdp::checkpoint
