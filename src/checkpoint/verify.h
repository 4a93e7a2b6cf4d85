// verify: reads every byte of a checkpoint once and lists everything that is wrong with it.
//
// With a manifest, the checksum of each block of each file is checked. Without one (Python writes
// none), the CRC-32 of each record of an item is. In both cases the items must hold the tensors
// that .metadata lists, the parts of a tensor must cover it, and the directory must hold what is
// listed and nothing else. A Hugging Face directory has no checksums: its headers are checked
// against the sizes of the files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace fsdp::checkpoint {

struct Problem {
  std::string file;                // "": the directory
  int64_t begin = -1, end = -1;    // bytes of the file; -1: the file as a whole
  std::string what;                // "is missing"
  std::vector<std::string> names;  // tensors and values in these bytes
};

enum class ChecksumKind { kBlocks, kRecords, kNone };

struct Verified {
  ChecksumKind sums = ChecksumKind::kNone;  // what was checked
  int64_t files = 0;
  int64_t bytes = 0;    // of these files
  int64_t tensors = 0;  // names
  std::vector<Problem> problems;
};

struct VerifyOptions {
  int threads = 0;  // 0: a few
  // Called repeatedly, by any thread but one at a time.
  std::function<void(int64_t done, int64_t total)> progress = {};
};

// Problems of the checkpoint are in the result; an Error means that there is none at `dir`. Uses
// 8 MiB of memory per thread, plus the metadata.
Verified verify(const std::filesystem::path& dir, const VerifyOptions& options = {});

}  // namespace fsdp::checkpoint
