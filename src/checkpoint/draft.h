// Drafts: a file or directory that appears under its name when it is complete, and not before.
//
// It is written under NAME.partial beside it and renamed. What is not published is removed when the
// draft goes; what a killed process left is overwritten by the next draft of that name.
#pragma once

#include <functional>

#include "checkpoint/files.h"

namespace fsdp::checkpoint {

class DraftFile {
 public:
  // An Error if there is something at `target`, unless it is a file and `replace` allows that.
  DraftFile(files::Path target, bool replace);
  ~DraftFile();
  DraftFile(const DraftFile&) = delete;
  DraftFile& operator=(const DraftFile&) = delete;

  const files::Path& path() const { return path_; }  // to write to
  void publish();                                    // it must be closed

 private:
  files::Path target_, path_;
  bool replace_, published_ = false;
};

class DraftDirectory {
 public:
  // Which names of files may be in it. Only such files are ever removed.
  using Ours = std::function<bool(const std::string& name)>;

  // An Error if there is something at `target`, unless it is an empty directory, or one with
  // nothing but such files and `replace` allows that.
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
