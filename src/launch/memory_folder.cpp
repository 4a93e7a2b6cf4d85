#include "launch/memory_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <utility>
#include <vector>

#include "base/format.h"

namespace fsdp::launch {
namespace {

namespace fs = std::filesystem;

constexpr int kAttempts = 3;

// Locked by us; none if another process has the lock, or there is no such folder.
FileDescriptor locked_folder(const std::string& path) {
  FileDescriptor folder(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (folder && flock(folder.get(), LOCK_EX | LOCK_NB) != 0) folder.close();
  return folder;
}

bool is_at(const FileDescriptor& folder, const std::string& path) {
  struct stat ours {}, there {};
  return fstat(folder.get(), &ours) == 0 && lstat(path.c_str(), &there) == 0 &&
         ours.st_ino == there.st_ino && ours.st_dev == there.st_dev;
}

void remove_folder(const std::string& path) noexcept {
  std::error_code ignored;
  fs::remove_all(path, ignored);
}

// Where the folders of all runs of this user are; empty if others could write there.
std::string folder_of_user(bool make) {
  const std::string path = formatted("/dev/shm/fsdp-{}", geteuid());
  if (make && mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) return "";
  struct stat found {};  // another user may have made it first
  if (lstat(path.c_str(), &found) != 0 || !S_ISDIR(found.st_mode)) return "";
  return found.st_uid == geteuid() && (found.st_mode & 077) == 0 ? path : "";
}

}  // namespace

void remove_dead_memory_folders() noexcept {
  try {
    const std::string folders = folder_of_user(/*make=*/false);
    if (folders.empty()) return;
    std::vector<std::string> found;
    std::error_code problem;
    for (const auto& entry : fs::directory_iterator(folders, problem))
      found.push_back(entry.path().string());
    for (const auto& path : found)
      if (FileDescriptor lock = locked_folder(path)) remove_folder(path);
  } catch (const std::exception&) {  // the next launcher tries again
  }
}

MemoryFolder::MemoryFolder(const std::string& name) {
  const std::string folders = folder_of_user(/*make=*/true);
  if (folders.empty()) return;
  const std::string path = folders + "/" + name;
  // Another launcher may take the new folder for that of a dead one, before it is locked.
  for (int attempt = 0; attempt < kAttempts && path_.empty(); ++attempt) {
    if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) return;
    lock_ = locked_folder(path);
    if (lock_ && is_at(lock_, path)) path_ = path;
  }
}

MemoryFolder& MemoryFolder::operator=(MemoryFolder&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(lock_, other.lock_);
  return *this;
}

MemoryFolder::~MemoryFolder() {
  if (!path_.empty()) remove_folder(path_);
}

}  // namespace fsdp::launch
