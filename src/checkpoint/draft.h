// Drafts: a file or directory that appears under its name only when it is complete.
//
// It is written as NAME.partial next to its final place and renamed. An unpublished draft is
// removed by the destructor; leftovers of a killed process are overwritten by the next draft of
// that name.
#pragma once

#include <functional>

#include "checkpoint/files.h"

namespace fsdp::checkpoint {

class DraftFile {
 public:
  // An Error if `target` exists, unless it is a file and `replace` is set.
  DraftFile(files::Path target, bool replace);
  ~DraftFile();
  DraftFile(const DraftFile&) = delete;
  DraftFile& operator=(const DraftFile&) = delete;

  const files::Path& path() const { return path_; }  // write here
  void publish();                                    // the file must be closed

 private:
  files::Path target_, path_;
  bool replace_, published_ = false;
};

class DraftDirectory {
 public:
  // Which file names may be in the directory. Only such files are ever removed.
  using Ours = std::function<bool(const std::string& name)>;

  // An Error if `target` exists, unless it is an empty directory, or `replace` is set and it holds
  // only such files.
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
  bool replace_, published_ = false;
  Ours ours_;
};

}  // namespace fsdp::checkpoint
