// Batches: the training loop's input, loaded ahead on a thread.
//
// Sample i of a source is tokens [i * seq, i * seq + seq + 1): the first seq are the input, the
// last seq the targets. With a packing, sample i is what that puts into it: whole documents, each
// with its own last token as its last target, then padding. The stream of samples is epoch 0 in its
// order, then epoch 1 in its own, and so on. Global batch k is samples [k * batch, (k + 1) * batch)
// of that stream, and rank r gets the r-th of `world` equal parts of it. No sample is dropped, the
// stream is the same at every world size, and a resumed run needs only a sample count to continue
// at the next sample.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>

#include "data/packing.h"
#include "data/source.h"
#include "data/split.h"

namespace fsdp::data {

struct BatchOptions {
  int64_t seq = 0;
  int64_t batch = 0;  // samples over all ranks; a multiple of `world`
  int rank = 0;
  int world = 1;
  uint64_t seed = 0;
  bool shuffle = true;
  bool document_mask = false;                        // fills Batch::documents; so does a packing
  std::shared_ptr<const Packing> packing = nullptr;  // of this source, for `seq`
  // Ends a document. Needed for document_mask, unless the files have an index.
  std::optional<int32_t> eos;
  int64_t prefetch = 2;  // batches loaded ahead; 0: none, and no thread
  int64_t position = 0;  // samples of the stream consumed earlier, over all ranks
  int64_t vocab = 0;     // ids must be below it; 0: not checked
  bool repeat = true;    // false: the stream ends after one epoch (evaluation)
  // The source's samples that the stream consists of; nullopt: all.
  std::optional<SampleSet> samples = {};
};

// This rank's part of a global batch, always batch / world rows. If the stream ends within it
// (repeat = false), all targets of the missing rows are -100, so that every rank can run the same
// model.
struct Batch {
  at::Tensor ids;           // [rows, seq] int64
  at::Tensor targets;       // [rows, seq] int64; -100 if the token doesn't count
  at::Tensor documents;     // [rows, seq] int64, the document's number within the row; or undefined
  int64_t room = 0;         // for documents in a row, the same for (nearly) all batches
  int64_t tokens = 0;       // targets that count, on this rank; of pairs: those with two answers
  int64_t samples = 0;      // rows that are samples, on this rank
  int64_t all_samples = 0;  // over all ranks; 0: the stream has ended
};

class Batches {
 public:
  Batches(std::shared_ptr<TokenSource> source, BatchOptions options);
  ~Batches();  // waits at most for the batch being loaded
  Batches(const Batches&) = delete;
  Batches& operator=(const Batches&) = delete;

  // A loading error is thrown at the batch where it occurred. For one thread.
  Batch next();

  int64_t position()
      const;  // samples returned by next() over all ranks, since the start of the run
  int64_t samples_per_epoch() const;
  std::chrono::nanoseconds waited() const;  // time that next() spent waiting for batches

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fsdp::data
