// The manifest: a file of ours beside PyTorch's, which says how long each file of a checkpoint is
// and what its blocks sum up to. Python's loader does not look at it.
//
//   {"block": 262144, "files": {".metadata": {"size": 812, "sums": "9a3f…"}, …},
//    "format": "fsdp manifest 1", "own": "77ab…"}
//
// Sums are XXH3 of 64 bits, 16 hexadecimal digits each, one behind the other; "own" is the sum of
// the manifest itself without that key, as compact JSON with sorted keys.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "checkpoint/sums.h"

namespace fsdp::checkpoint {

inline constexpr const char* kManifestName = ".manifest.json";

struct Manifest {
  std::map<std::string, FileSums> files;  // by name, all in one directory
};

std::string encode_manifest(const Manifest& manifest);
// Everything is checked. `where` is the file's name in errors.
Manifest decode_manifest(std::string_view text, const std::string& where);

// Of a checkpoint's directory; none where there is no such file (Python writes none).
std::optional<Manifest> read_manifest(const std::filesystem::path& dir);
void write_manifest(const std::filesystem::path& dir, const Manifest& manifest);  // on the disk

}  // namespace fsdp::checkpoint
