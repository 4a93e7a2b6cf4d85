// Corpus: what a model is trained on. Samples have places in one global order; a step takes the
// next `batch` of them, each rank its part.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "fsdp/tokenizer.h"
#include "fsdp/world.h"
#include "train/config.h"
#include "train/trainee.h"

namespace fsdp::train {

// Samples from some position on.
class Feed {
 public:
  virtual ~Feed() = default;
  virtual Samples next() = 0;                           // this rank's part of the next batch
  virtual int64_t position() const = 0;                 // samples taken so far, over all ranks
  virtual std::chrono::nanoseconds waited() const = 0;  // for data, in next()
};

class Corpus {
 public:
  virtual ~Corpus() = default;
  virtual std::unique_ptr<Feed> training(const World& world, int64_t position) const = 0;
  // All samples that were put aside, once and in order; null where there are none.
  virtual std::unique_ptr<Feed> validation(const World& world) const = 0;
  virtual int64_t validation_batches() const = 0;  // that validation() has
  virtual int64_t samples_per_epoch() const = 0;
  virtual std::string title() const = 0;  // "1,323 files of text, 8.1M tokens"
  virtual std::shared_ptr<const data::Tokenizer> tokenizer() const { return nullptr; }
  virtual int64_t vocab() const { return 0; }  // ids are below it; 0: not known
};

// `cache`: a folder for what takes long to make (tokens of text). Ranks of a host that open the
// same at once wait for each other.
std::unique_ptr<Corpus> open_corpus(const Config& config, const std::string& cache);

// An Error where a file or folder that the config names is not there. Nothing is opened: for the
// launcher, so that one process says it before many are started.
void check_paths(const Config& config);

// The C++ headers that LibTorch brings: text that is there wherever this library is.
std::vector<std::string> libtorch_headers();

}  // namespace fsdp::train
