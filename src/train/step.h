// One step of training: gradients of the whole batch in micro-batches, the check that they are
// finite, the clip, the update.
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
  int64_t micro_batch = 0;        // samples at once; 0: all
  double clip = 0;                // 0: none
  bool masked = false;            // ranks may have different numbers of targets that count
  bool step_in_backward = false;  // see Optimizer; without clip and scaler
};

struct StepOutcome {     // the same on every rank
  double loss = 0;       // mean over everything that counts
  double grad_norm = 0;  // before the clip
  int64_t counted = 0;   // targets, over all ranks
  bool updated = false;  // false: loss or gradient was not finite, and nothing has changed
  bool stop = false;     // some rank was asked to stop
  std::chrono::steady_clock::time_point known = {};  // when the host had it; not the same
};

// Collective. `wants_to_stop` is asked when all is computed: did this rank get a signal? `scaler`
// is for float16 only.
StepOutcome take_step(const World& world, const Trainee& trainee, const Sharded& sharded,
                      Optimizer& optimizer, GradScaler* scaler, const Samples& batch,
                      const StepOptions& options, const std::function<bool()>& wants_to_stop);

// Mean loss over `batches` batches of the feed (fewer where it ends), without gradients.
// Collective.
struct Evaluation {
  double loss = 0;
  double perplexity = 0;
  int64_t counted = 0;
};
Evaluation evaluate(const World& world, const Trainee& trainee, Feed& feed, int64_t batches,
                    int64_t micro_batch);

}  // namespace fsdp::train
