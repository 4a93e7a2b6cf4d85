// Batches: what the training loop takes its data from. Loads ahead on a thread of its own.
//
// Sample i of a source is tokens [i * seq, i * seq + seq + 1): the first seq are the input, the
// last seq the targets. The stream of samples is epoch 0 in its order, then epoch 1 in its own, and
// so on; global batch k is samples [k * batch, (k + 1) * batch) of that stream, and rank r has the
// r-th of `world` equal parts of it. So nothing is left out, the stream is the same at every world
// size, and a number of samples is all that a resumed run needs to go on at the very next one.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>

#include "data/source.h"

namespace fsdp::data {

struct BatchOptions {
  int64_t seq = 0;
  int64_t batch = 0;  // samples of all ranks together; a multiple of `world`
  int rank = 0;
  int world = 1;
  uint64_t seed = 0;
  bool shuffle = true;
  bool document_mask = false;  // fills Batch::documents
  std::optional<int32_t>
      eos;               // ends a document; needed for document_mask unless the files have an index
  int64_t prefetch = 2;  // batches loaded ahead; 0: none, and no thread
  int64_t position = 0;  // samples of the stream that were consumed before, by all ranks
  int64_t vocab = 0;     // ids must be below it; 0: not checked
  bool repeat = true;    // false: the stream ends after one epoch (evaluation)
};

// This rank's part of a global batch. Always batch / world rows: where the stream ends in between
// (repeat = false), the rows that are missing have targets of -100 alone, so that every rank can
// run the same model on them.
struct Batch {
  at::Tensor ids;           // [rows, seq] int64
  at::Tensor targets;       // [rows, seq] int64; -100 where it does not count
  at::Tensor documents;     // [rows, seq] int64, the document's number within the row; or undefined
  int64_t tokens = 0;       // targets that count, on this rank
  int64_t samples = 0;      // rows that are samples, on this rank
  int64_t all_samples = 0;  // of all ranks together; 0: the stream has ended
};

class Batches {
 public:
  Batches(std::shared_ptr<TokenSource> source, BatchOptions options);
  ~Batches();  // does not wait for more than the batch being loaded
  Batches(const Batches&) = delete;
  Batches& operator=(const Batches&) = delete;

  // Throws what went wrong while loading, at the batch at which it did. For one thread.
  Batch next();

  int64_t position() const;  // samples handed out by next(), by all ranks, since the very start
  int64_t samples_per_epoch() const;
  std::chrono::nanoseconds waited() const;  // time spent in next() until the batch was there

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fsdp::data
