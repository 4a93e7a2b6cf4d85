// One training step: gradients of the batch in micro-batches, the check for non-finite values,
// clipping, and the update.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>

#include "fsdp/fully_shard.h"
#include "fsdp/grad_scaler.h"
#include "fsdp/optim.h"
#include "fsdp/world.h"
#include "train/corpus.h"
#include "train/trainee.h"

namespace fsdp::train {

struct StepOptions {
  int64_t micro_batch = 0;        // samples per pass; 0: all
  double clip = 0;                // 0: no clipping
  bool masked = false;            // the number of targets that count may differ between ranks
  bool step_in_backward = false;  // see Optimizer; not with clipping or a scaler
};

struct StepOutcome {     // the same on every rank, except for `known`
  double loss = 0;       // mean over all targets that count
  double grad_norm = 0;  // before clipping
  int64_t counted = 0;   // targets that count, over all ranks
  bool updated = false;  // false: loss or gradient wasn't finite, and nothing changed
  bool stop = false;     // some rank was asked to stop
  std::chrono::steady_clock::time_point known = {};  // when the host got the outcome
};

// Collective. `wants_to_stop` is called after the computation: did this rank get a signal? `scaler` is
// for fp16 only.
StepOutcome take_step(const World& world, const Trainee& trainee, const Sharded& sharded,
                      Optimizer& optimizer, GradScaler* scaler, const Samples& batch,
                      const StepOptions& options, const std::function<bool()>& wants_to_stop);

// Mean loss over `batches` batches of the feed (fewer if it ends), without gradients. Collective.
struct Evaluation {
  double loss = 0;
  double perplexity = 0;
  int64_t counted = 0;
};
Evaluation evaluate(const World& world, const Trainee& trainee, Feed& feed, int64_t batches,
                    int64_t micro_batch);

}  // namespace fsdp::train
