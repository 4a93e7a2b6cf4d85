// Drafts: a file or directory that appears under its name only when it is complete.
//
// It is written as NAME.partial next to its final place and renamed. An unpublished draft is
// removed by the destructor, and the leftovers of a killed process by the next draft of that name.
// One process at a time writes it (draft_lock.h); others get an Error at once.
#pragma once

#include <functional>
#include <optional>

#include "checkpoint/draft_lock.h"
#include "checkpoint/files.h"

namespace fsdp::checkpoint {

class DraftFile {
 public:
  // An Error if `target` exists, unless it is a file and `replace` is set, or if another process
  // writes it.
  DraftFile(files::Path target, bool replace);
  ~DraftFile();
  DraftFile(const DraftFile&) = delete;
  DraftFile& operator=(const DraftFile&) = delete;

  const files::Path& path() const { return path_; }  // write here
  void publish();                                    // the file must be closed

 private:
  files::Path target_, path_;
  std::optional<DraftLock> lock_;
  bool replace_, published_ = false;
};

class DraftDirectory {
 public:
  // Which file names may be in the directory. Only such files are ever removed.
  using Ours = std::function<bool(const std::string& name)>;

  // An Error if `target` exists, unless it is an empty directory, or `replace` is set and it holds
  // only such files; or if another process writes it.
  DraftDirectory(files::Path target, bool replace, Ours ours);
  ~DraftDirectory();
  DraftDirectory(const DraftDirectory&) = delete;
  DraftDirectory& operator=(const DraftDirectory&) = delete;

  const files::Path& path() const { return path_; }
  void publish();  // all files in it must be closed

 private:
  void check_target() const;
  void remove(const files::Path& dir) const;
  std::string foreign_in(const files::Path& dir) const;

  files::Path target_, path_;
  std::optional<DraftLock> lock_;
  bool replace_, published_ = false;
  Ours ours_;
};

}  // namespace fsdp::checkpoint
