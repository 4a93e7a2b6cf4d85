// Corpus: the training and validation data. Samples have one global order; a step takes the next
// `batch` of them, and each rank gets its part.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "fsdp/tokenizer.h"
#include "fsdp/world.h"
#include "train/config.h"
#include "train/share.h"
#include "train/task.h"

namespace fsdp::train {

// A stream of samples, from some position on.
class Feed {
 public:
  virtual ~Feed() = default;
  virtual Samples next() = 0;                           // this rank's part of the next batch
  virtual int64_t position() const = 0;                 // samples taken so far, over all ranks
  virtual std::chrono::nanoseconds waited() const = 0;  // time that next() waited for data
};

// What packing makes of a corpus.
struct Packed {
  double padding = 0;       // share of the tokens
  double usual_length = 0;  // of a document, for the cost of attention
  bool pairs = false;       // of chosen and rejected answers
};

class Corpus {
 public:
  virtual ~Corpus() = default;
  virtual std::unique_ptr<Feed> training(const Share& share, int64_t position) const = 0;
  // The validation samples, each once, in an order that never changes; null if there are none.
  virtual std::unique_ptr<Feed> validation(const Share& share) const = 0;
  virtual int64_t validation_batches() const = 0;  // in validation()
  virtual int64_t samples_per_epoch() const = 0;
  // How validation samples were held out of the training data; "": they weren't.
  virtual std::string split_rule() const { return ""; }
  virtual std::optional<Packed> packed() const { return std::nullopt; }
  virtual std::string title() const = 0;  // "1,323 files of text, 8.1M tokens"
  virtual std::shared_ptr<const data::Tokenizer> tokenizer() const { return nullptr; }
  virtual int64_t vocab() const { return 0; }  // ids are below it; 0: unknown
};

// `cache`: a directory for tokenized text. Ranks of one host that open the same text wait for the
// one that tokenizes it.
std::unique_ptr<Corpus> open_corpus(const Config& config, const std::string& cache);

// Throws Error if a path in the config doesn't exist. Opens nothing: the launcher calls it, so that
// one process reports the error before many are started.
void check_paths(const Config& config);

// LibTorch's C++ headers: text that exists wherever this library does.
std::vector<std::string> libtorch_headers();

}  // namespace fsdp::train
