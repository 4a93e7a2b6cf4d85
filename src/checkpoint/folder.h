// A folder of checkpoints: publishing, listing and deleting.
//
// A checkpoint is written to NAME.partial.WRITER and renamed when it is complete. WRITER is unique,
// so that two processes that save at the same time never write the same files. An old checkpoint of
// that name is atomically swapped with the new one; on file systems without that, it is
// NAME.replaced between two renames. A checkpoint is renamed to NAME.deleted before it is deleted,
// so that half a checkpoint never has the name of a complete one.
//
// Whoever begins a save of a name, or takes a folder over (fence), renames what other writers have
// begun. Their renames then find nothing, so they can't publish it, whenever they wake up.
//
// Nothing but checkpoints is ever replaced or deleted: a directory that holds anything but the
// files of one (.metadata, .manifest.json, __R_N.distcp) is an Error, and only such files are
// unlinked.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

namespace fsdp::checkpoint {

// The path without a trailing "/"; an Error unless it ends in a valid checkpoint name.
std::filesystem::path checked_name(const std::filesystem::path& dir);

// A save under way.
struct Partial {
  std::filesystem::path dir;         // of the checkpoint
  std::string writer;                // letters, digits and "-"
  std::function<void()> check = {};  // throws if this process may not write here anymore
  bool newest = true;                // the link `latest` will point to it

  std::filesystem::path path() const;  // of the directory to write to
};
std::string new_writer();  // a name that no other save has

// Creates the empty directory to write to; removes what other saves of this name left or are
// writing. An Error if `dir` exists and isn't a checkpoint. With a `check`, the folder must exist.
void begin_partial(const Partial& partial);
// Renames it to `dir` and, if `newest`, points `latest` to it. Everything in it must be durable.
void publish_partial(const Partial& partial);
void drop_partial(const Partial& partial) noexcept;  // best effort

// Ends what all other writers have begun in a folder.
void fence(const std::filesystem::path& folder, const std::string& writer);

// As in fsdp/checkpoint.h; `check` is called before each deletion.
void keep_last(const std::filesystem::path& folder, int64_t count,
               const std::function<void()>& check);

// Renames a damaged checkpoint, so that nothing counts it anymore. Returns its new path.
std::filesystem::path set_aside(const std::filesystem::path& dir);

}  // namespace fsdp::checkpoint
