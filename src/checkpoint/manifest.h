// The manifest: a file of ours next to PyTorch's, with the size of each file of a checkpoint and
// the checksums of its blocks. Python's loader ignores it.
//
//   {"block": 262144, "files": {".metadata": {"size": 812, "sums": "9a3f…"}, …},
//    "format": "fsdp manifest 1", "own": "77ab…"}
//
// .metadata holds the mark of the manifest: a sum of all that it says about other files. A manifest
// that is lost, or that belongs to another checkpoint, is therefore noticed.
//
// Sums are 64-bit XXH3, concatenated, 16 hexadecimal digits each. "own" is the sum of the manifest
// itself without that key, as compact JSON with sorted keys.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "checkpoint/sums.h"

namespace fsdp::checkpoint {

inline constexpr const char* kMetadataName = ".metadata";
inline constexpr const char* kManifestName = ".manifest.json";
inline constexpr const char* kMarkPrefix = "fsdp manifest ";

struct Manifest {
  std::map<std::string, FileSums> files;  // by name, all in one directory
};

std::string encode_manifest(const Manifest& manifest);
// Checks everything. `where` names the file in errors.
Manifest decode_manifest(std::string_view text, const std::string& where);

// "fsdp manifest 9a3f…": what Metadata::mark says about it.
std::string mark_of(const Manifest& manifest);

// The manifest of a checkpoint's directory; nullopt if there is none (Python writes none).
std::optional<Manifest> read_manifest(const std::filesystem::path& dir);
void write_manifest(const std::filesystem::path& dir, const Manifest& manifest);  // durable

}  // namespace fsdp::checkpoint
