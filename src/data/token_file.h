// TokenFile: a file of token ids in a format of another program.
//
//   nanogpt   FILE.bin: uint16, nothing else
//   llmc      FILE.bin: 256 int32 (magic 20240520, version 1, count), then uint16;
//             or magic 20240801, version 7, then uint32, as llm.c writes for Llama 3
//   megatron  FILE.bin: ids of the type in FILE.idx; FILE.idx: lengths of sequences, and which of
//             them begin documents
//
// All numbers are little-endian. Sizes are checked to the byte: a truncated file, or one of another
// kind, is an Error that says so. Ids aren't checked here, because that would read the whole file.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data/format.h"

namespace fsdp::data {

class DataFile;

class TokenFile {
 public:
  // `format`: one of the above, or kAuto. A .idx may be passed instead of its .bin. Throws Error.
  static std::shared_ptr<TokenFile> open(const std::string& path, Format format = Format::kAuto);
  TokenFile();
  ~TokenFile();

  const std::string& path() const;
  Format format() const { return format_; }
  int64_t tokens() const { return tokens_; }
  int64_t file_bytes() const;

  // Tokens [first, first + count), which must exist. Ids may be any number: the caller checks them
  // against its vocabulary.
  void read(int64_t first, int64_t count, int64_t* ids) const;
  // Positions in [first, first + count) where documents begin. Empty without an index.
  std::vector<int64_t> document_starts(int64_t first, int64_t count) const;

 private:
  enum Type { kUint8, kInt8, kInt16, kUint16, kInt32, kUint32, kInt64 };
  void open_nanogpt();
  void open_llmc();
  void open_megatron(const std::string& index);
  void check_sequences(int64_t width);  // of the index; they fill the file
  void check_documents();
  int64_t document_start(int64_t document) const;  // in tokens, from the index

  Format format_ = Format::kAuto;
  std::unique_ptr<DataFile> file_, index_;
  int64_t first_ = 0;  // where the tokens begin, in bytes
  Type type_ = kUint16;
  int64_t tokens_ = 0;
  int64_t sequences_ = 0, documents_ = 0;  // of the index
  std::vector<int64_t> starts_;            // of every kStride-th document, so that a search is short
};

// FILE.mask next to a token file: one byte per token, 1 if it counts in the loss, 0 if not.
class MaskFile {
 public:
  explicit MaskFile(const TokenFile& tokens);  // throws Error if missing or of another length
  ~MaskFile();
  void read(int64_t first, int64_t count, uint8_t* counts) const;  // throws Error for other values

 private:
  std::unique_ptr<DataFile> file_;
};

// `path` with another extension.
std::string sibling(const std::string& path, const std::string& extension);

}  // namespace fsdp::data
