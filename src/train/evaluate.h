// The loss of a model on data it isn't trained on.
#pragma once

#include <cstdint>
#include <optional>

#include "fsdp/world.h"
#include "train/corpus.h"
#include "train/task.h"

namespace fsdp::train {

struct Evaluation {
  double loss = 0;
  std::optional<double> perplexity;  // if the loss is of likelihoods
  int64_t counted = 0;
};

// Mean loss over `batches` batches of the feed (fewer if it ends), without gradients. Collective.
Evaluation evaluate(const World& world, const TrainTask& task, Feed& feed, int64_t batches,
                    int64_t micro_batch);

}  // namespace fsdp::train
