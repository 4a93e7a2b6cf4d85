// Models that Hugging Face's programs have downloaded, by their names.
#pragma once

#include <filesystem>
#include <string>

namespace fsdp::train {

// The directory that `where` means: itself if it exists, else the snapshot of the model with that
// name ("Qwen/Qwen3-0.6B") in Hugging Face's cache. Throws Error if `where` can only be such a name
// and the cache doesn't have it; any other path is returned as it is. Downloads nothing.
std::filesystem::path local_model(const std::string& where);

// The name of the model whose snapshot in the cache `dir` is; empty for other directories.
std::string hub_name(const std::filesystem::path& dir);

}  // namespace fsdp::train
