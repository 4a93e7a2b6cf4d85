// A folder of checkpoints: publishing, listing and deleting.
//
// A checkpoint is written to NAME.partial and renamed when it is complete. An old checkpoint of
// that name is atomically swapped with the new one; on file systems without that, it is
// NAME.replaced between two renames. A checkpoint is renamed to NAME.deleted before it is deleted,
// so that half a checkpoint never has the name of a complete one.
//
// Nothing but checkpoints is ever replaced or deleted: a directory that holds anything but the
// files of one (.metadata, .manifest.json, __R_N.distcp) is an Error, and only such files are
// unlinked.
#pragma once

#include <filesystem>

namespace fsdp::checkpoint {

// The path without a trailing "/"; an Error unless it ends in a valid checkpoint name.
std::filesystem::path checked_name(const std::filesystem::path& dir);
std::filesystem::path partial_of(const std::filesystem::path& dir);

// Creates the empty directory to write to; removes leftovers of a killed run. An Error if `dir`
// exists and isn't a checkpoint. `newest`: the link `latest` will point to it.
void begin_partial(const std::filesystem::path& dir, bool newest = true);
// Renames it to `dir` and, if `newest`, points `latest` to it. Everything in it must be durable.
void publish_partial(const std::filesystem::path& dir, bool newest = true);
void drop_partial(const std::filesystem::path& dir) noexcept;  // best effort

}  // namespace fsdp::checkpoint
