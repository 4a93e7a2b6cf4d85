#include "checkpoint/draft.h"

#include <utility>

#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::checkpoint {
namespace {

namespace fs = std::filesystem;
using files::Path;

Path named(const Path& target) {
  const Path path = target.has_filename() ? target : target.parent_path();  // "out/" is "out"
  const std::string last = path.filename().string();
  if (last.empty() || last == "." || last == "..")
    throw Error(formatted("\"{}\" isn't a valid output path.", target),
                "pass the file or directory to create.");
  return path;
}

Path partial(const Path& target) {
  return target.parent_path() / (target.filename().string() + ".partial");
}

fs::file_type kind_of(const Path& path) {
  std::error_code problem;
  return fs::symlink_status(path, problem).type();
}

[[noreturn]] void refuse(const Path& target) {
  throw Error(formatted("{}: already exists.", target),
              "choose another name, or replace it with --force.");
}

void check_file(const Path& target, bool replace) {
  const auto kind = kind_of(target);
  if (kind == fs::file_type::not_found) return;
  if (kind == fs::file_type::directory)
    throw Error(formatted("{}: is a directory.", target), "pass the path of a file.");
  if (!replace) refuse(target);
}

}  // namespace

// --- a file ---

DraftFile::DraftFile(Path target, bool replace)
    : target_(named(target)), path_(partial(target_)), replace_(replace) {
  check_file(target_, replace_);
  files::make_directories(target_.parent_path());
  lock_.emplace(path_);
  check_file(target_, replace_);  // another process may have published it meanwhile
  files::remove_file(path_);
}

DraftFile::~DraftFile() {
  std::error_code problem;
  if (!published_ && lock_->is_held()) fs::remove(path_, problem);
}

void DraftFile::publish() {
  lock_->check();
  check_file(target_, replace_);
  files::rename(path_, target_);
  published_ = true;
  files::sync_directory(target_.parent_path());
}

// --- a directory ---

DraftDirectory::DraftDirectory(Path target, bool replace, Ours ours)
    : target_(named(target)), path_(partial(target_)), replace_(replace), ours_(std::move(ours)) {
  check_target();
  files::make_directories(target_.parent_path());
  lock_.emplace(path_);
  check_target();  // another process may have published it meanwhile
  remove(path_);
  files::make_directories(path_);
}

DraftDirectory::~DraftDirectory() {
  if (published_ || !lock_->is_held()) return;
  try {
    remove(path_);
  } catch (const std::exception&) {  // the next draft of this name retries
  }
}

// The name of an entry in a directory that isn't a file of ours; "" if there is none.
std::string DraftDirectory::foreign_in(const Path& dir) const {
  if (kind_of(dir) != fs::file_type::directory) return dir.filename().string();
  for (const auto& entry : fs::directory_iterator(dir)) {
    const std::string name = entry.path().filename().string();
    if (kind_of(entry.path()) != fs::file_type::regular || !ours_(name)) return name;
  }
  return "";
}

void DraftDirectory::check_target() const {
  const auto kind = kind_of(target_);
  if (kind == fs::file_type::not_found) return;
  std::error_code problem;
  if (kind == fs::file_type::directory && fs::is_empty(target_, problem)) return;
  if (!replace_) refuse(target_);
  const std::string foreign = foreign_in(target_);
  if (!foreign.empty())
    throw Error(formatted("{}: holds \"{}\", which isn't output of this command, so the directory "
                          "is not replaced.",
                          target_, foreign),
                "choose another name.");
}

void DraftDirectory::remove(const Path& dir) const {
  if (kind_of(dir) == fs::file_type::not_found) return;
  const std::string foreign = foreign_in(dir);
  if (!foreign.empty())
    throw Error(formatted("{}: is in the way and holds \"{}\".", dir, foreign),
                "move it away, or choose another name.");
  std::vector<Path> found;
  for (const auto& entry : fs::directory_iterator(dir)) found.push_back(entry.path());
  for (const auto& file : found) files::remove_file(file);
  files::remove_directory(dir);
}

void DraftDirectory::publish() {
  files::sync_directory(path_);
  lock_->check();
  check_target();
  std::error_code problem;
  const bool taken =
      kind_of(target_) == fs::file_type::directory && !fs::is_empty(target_, problem);
  Path old = path_;  // where the old directory ends up
  if (!taken) {
    files::rename(path_, target_);                // replaces an empty directory
  } else if (!files::exchange(path_, target_)) {  // unsupported on some file systems
    old = target_.parent_path() / (target_.filename().string() + ".replaced");
    remove(old);
    files::rename(target_, old);
    try {
      files::rename(path_, target_);
    } catch (...) {
      files::rename(old, target_);
      throw;
    }
  }
  published_ = true;
  files::sync_directory(target_.parent_path());
  if (taken) remove(old);
}

}  // namespace fsdp::checkpoint
