// TokenSource: one long sequence of tokens with random access, whatever it is made of: token files,
// text read as bytes, text that was tokenised. Files follow each other in the order of their paths.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/tokenizer.h"

namespace fsdp::data {

// What a source was made of, for one line to people.
struct SourceInfo {
  std::string kind;  // "text as bytes", "text", "nanogpt", "llmc", "megatron", "mixed"
  int64_t files = 0;
  int64_t bytes = 0;  // of those files
};

// All functions may be called from many threads at once.
class TokenSource {
 public:
  virtual ~TokenSource() = default;

  virtual int64_t tokens() const = 0;
  // Tokens [first, first + count), which must exist.
  virtual void read(int64_t first, int64_t count, int64_t* ids) const = 0;
  // 1 where a token counts in the loss, 0 where it does not. All 1 without a mask.
  virtual void read_mask(int64_t first, int64_t count, uint8_t* counts) const;
  virtual bool has_mask() const { return false; }
  // Those positions in [first, first + count) at which a document begins by an index of the file
  // (Megatron). Documents that end in a token of their own are not listed.
  virtual std::vector<int64_t> document_starts(int64_t first, int64_t count) const;
  // "FILE: token 17", for errors.
  virtual std::string where(int64_t token) const = 0;
  virtual SourceInfo info() const = 0;
};

struct SourceOptions {
  std::vector<std::string> paths;              // files, and folders that are searched for files
  std::string format = "auto";                 // auto, text, nanogpt, llmc, megatron
  std::shared_ptr<const Tokenizer> tokenizer;  // for text; not needed for token files
  bool loss_mask = false;                      // FILE.mask beside each FILE.bin must exist
  std::string cache_dir;                       // where tokenised text is kept; empty: in memory
};

// Throws Error where a path is missing, has nothing in it, or is not what the format says.
std::shared_ptr<TokenSource> open_source(const SourceOptions& options);

// Splits the last `share` of the samples off, for validation: a sample is `seq` tokens and the one
// after them, and the cut falls between two. {training, validation}; with share 0 the second is
// null.
std::pair<std::shared_ptr<TokenSource>, std::shared_ptr<TokenSource>> split_tail(
    std::shared_ptr<TokenSource> source, double share, int64_t seq);

}  // namespace fsdp::data
