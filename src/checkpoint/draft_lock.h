// DraftLock: whose draft it is (draft.h).
//
// The writer of a draft holds a lock on DRAFT.lock, which says who that is. The kernel releases the
// lock when the process ends, however that happens. So a draft beside a lock file that nobody holds
// is the leftover of a dead process, and the next one of that name may remove it. A draft without a
// lock file isn't ours and stays, and so does one of another user.
//
// Where the file system has no locks, the file's existence is the lock, and a leftover is an Error.
#pragma once

#include <string>

#include "checkpoint/files.h"

namespace fsdp::checkpoint {

class DraftLock {
 public:
  // Throws Error if another process writes `draft`, or what is there may not be removed.
  explicit DraftLock(files::Path draft);
  ~DraftLock();
  DraftLock(const DraftLock&) = delete;
  DraftLock& operator=(const DraftLock&) = delete;

  // Whether the lock file is still there. If somebody has removed it, the draft may be another
  // process's.
  bool is_held() const;
  void check() const;  // throws Error unless it is

 private:
  bool open_file();  // false: try again
  bool lock();       // false: try again
  void write_owner() const;
  std::string owner() const;
  [[noreturn]] void refuse(const std::string& what, const std::string& hint) const;

  files::Path draft_, path_;
  int handle_ = -1;
  bool created_ = false;  // by this process
};

// Whether an entry of a folder is a draft, or its lock file.
bool is_draft(const files::Path& path);

}  // namespace fsdp::checkpoint
