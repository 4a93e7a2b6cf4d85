// TokenSource: one long sequence of tokens with random access, made of token files, text read as
// bytes, or tokenized text. Files of a folder are in the order of their paths.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data/conversations.h"
#include "data/format.h"
#include "fsdp/tokenizer.h"

namespace fsdp::data {

// What a source is made of, to be shown in one line.
struct SourceInfo {
  std::string kind = {};  // "text as bytes", "text", "nanogpt", "llmc", "megatron", "mixed", or
                          // "text of JSON lines" and such
  int64_t files = 0;
  int64_t bytes = 0;  // of those files
  bool pairs = false;  // each two documents are the chosen and the rejected answer to one prompt
};

// All functions are thread-safe.
class TokenSource {
 public:
  virtual ~TokenSource() = default;

  virtual int64_t tokens() const = 0;
  // Tokens [first, first + count), which must exist.
  virtual void read(int64_t first, int64_t count, int64_t* ids) const = 0;
  // 1 if a token counts in the loss, 0 if not. All 1 without a mask.
  virtual void read_mask(int64_t first, int64_t count, uint8_t* counts) const;
  virtual bool has_mask() const { return false; }
  // Positions in [first, first + count) where a document is known to begin: by a file's index, or
  // by the text. Documents that are separated only by a token aren't listed.
  virtual std::vector<int64_t> document_starts(int64_t first, int64_t count) const;
  // Whether document_starts() has all documents.
  virtual bool lists_documents() const { return false; }
  // Whether an end-of-document token at a position ends a document. In conversations it ends a
  // turn, and document_starts() has the documents.
  virtual bool ends_document(int64_t token) const;
  // "FILE: token 17", for errors.
  virtual std::string where(int64_t token) const = 0;
  virtual SourceInfo info() const = 0;
};

struct SourceOptions {
  std::vector<std::string> paths;  // files, and folders to search for files
  Format format = Format::kAuto;
  std::shared_ptr<const Tokenizer> tokenizer;  // for text; not needed for token files
  // FILE.mask next to each FILE.bin must exist; of JSON lines only what is learned counts.
  bool loss_mask = false;
  JsonlOptions lines = {};  // for JSON lines
  std::string cache_dir;    // for tokenized text; empty: in memory
};

// Throws Error if a path doesn't exist, has no data, or isn't in the format.
std::shared_ptr<TokenSource> open_source(const SourceOptions& options);

// Why a loss mask is to be used with these paths: "FILE.mask selects ..."; "" if none has one.
// Looks at names and first lines only.
std::string reason_for_mask(const std::vector<std::string>& paths, const JsonlOptions& lines);
// Whether one of the paths has pairs of chosen and rejected answers.
bool has_pairs(const std::vector<std::string>& paths, const JsonlOptions& lines);
// Why documents are to be packed: "FILE has conversations ..."; "" if no file has such lines.
std::string reason_for_packing(const std::vector<std::string>& paths, const JsonlOptions& lines);

}  // namespace fsdp::data
