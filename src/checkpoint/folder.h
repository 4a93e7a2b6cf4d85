// A folder of checkpoints: how one comes into being under its name, and which are there.
//
// A checkpoint is written into NAME.partial and renamed when it is complete. One that is replaced
// changes places with the new one; where the file system cannot do that, it waits as NAME.replaced
// for the moment between two renames. What is deleted is renamed to NAME.deleted first, so that
// half a checkpoint never has the name of a whole one.
//
// Nothing but checkpoints is ever replaced or deleted: a directory with anything else in it than
// the files of one (.metadata, .manifest.json, __R_N.distcp) is an Error, and only such files are
// unlinked.
#pragma once

#include <filesystem>

namespace fsdp::checkpoint {

// The path without "/" at its end; an Error unless it ends in a name that a checkpoint may have.
std::filesystem::path checked_name(const std::filesystem::path& dir);
std::filesystem::path partial_of(const std::filesystem::path& dir);

// An empty directory to write to; what a killed run left there is removed. An Error if there is
// something at `dir` that is no checkpoint. `newest`: the link `latest` will name it.
void begin_partial(const std::filesystem::path& dir, bool newest = true);
// Makes it the checkpoint `dir`, and `latest` name it if it is the newest. Everything in it must be
// on the disk.
void publish_partial(const std::filesystem::path& dir, bool newest = true);
void drop_partial(const std::filesystem::path& dir) noexcept;  // as far as that is possible

}  // namespace fsdp::checkpoint
