// verify: reads every byte of a checkpoint once, and lists everything that is wrong with it.
//
// With a manifest each block of each file is summed. Without one (Python writes none) the CRC-32
// that each record of an item has must do. In both cases the items must hold the tensors that
// .metadata says, the parts of a tensor must make up the whole, and the directory must hold what is
// listed and nothing else. A Hugging Face directory has no sums: there the headers are read and
// held against the sizes of the files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace fsdp::checkpoint {

struct Problem {
  std::string file;                // "": of the directory
  int64_t begin = -1, end = -1;    // bytes of the file; -1: the file as a whole
  std::string what;                // "is missing"
  std::vector<std::string> names;  // of tensors and values that lie there
};

struct Verified {
  enum Sums { kBlocks, kRecords, kNone } sums = kNone;  // which of them the bytes were held against
  int64_t files = 0;
  int64_t bytes = 0;    // of these files
  int64_t tensors = 0;  // names
  std::vector<Problem> problems;
};

struct VerifyOptions {
  int threads = 0;  // 0: a few
  // Called now and then, by any thread but one at a time.
  std::function<void(int64_t done, int64_t total)> progress = {};
};

// What is wrong with the checkpoint is in the result; an Error means that there is none at `dir`.
// Uses 8 MiB of memory a thread, beside the lists of what is there.
Verified verify(const std::filesystem::path& dir, const VerifyOptions& options = {});

}  // namespace fsdp::checkpoint
