// TokenWriter: writes token files (see token_file.h). Files have temporary names until finish(), so
// a file with its final name is complete.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "data/format.h"

namespace fsdp::data {

class TokenWriter {
 public:
  // `format`: kNanogpt, kLlmc or kMegatron. Ids must be below `vocab`, which decides their width;
  // nanogpt is limited to 16 bits. `mask`: also write FILE.mask.
  TokenWriter(const std::string& path, Format format, int64_t vocab, bool mask = false);
  ~TokenWriter();  // removes unfinished files
  TokenWriter(const TokenWriter&) = delete;
  TokenWriter& operator=(const TokenWriter&) = delete;

  // Adds a document. With a mask, `counts` (1: counts in the loss) must be as long as `ids`.
  void add(const std::vector<int32_t>& ids, const std::vector<uint8_t>& counts = {});
  int64_t tokens() const { return tokens_; }

  // Completes the files and renames them. Throws Error if there are no tokens.
  void finish();

 private:
  struct File {
    std::string path, temporary;
    std::FILE* stream = nullptr;
  };
  File& create(const std::string& path);
  void write(File& file, const void* data, size_t bytes);
  void write_index();

  Format format_;
  int64_t vocab_;
  int width_;
  bool mask_;
  std::vector<File> files_;  // the tokens, then the mask if any, then the index
  int64_t tokens_ = 0;
  std::vector<int32_t> lengths_;  // of documents, for Megatron's index
  std::vector<char> buffer_;
};

}  // namespace fsdp::data
