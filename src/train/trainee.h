// Trainee: what is trained, in a form that the loop need not tell apart: a module, and the loss of
// some samples as a sum over what counts, so that the mean over all ranks and micro-batches is
// exact.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>

#include "fsdp/models.h"
#include "fsdp/wrap.h"
#include "train/config.h"

namespace fsdp::train {

struct Samples {         // a rank's part of a batch, or a part of that
  at::Tensor inputs;     // int64 [samples, seq], or float [samples, width]
  at::Tensor targets;    // likewise; -100 does not count
  at::Tensor documents;  // int64 [samples, seq]; undefined: one document
  int64_t count = 0;     // samples
  int64_t counted = 0;   // targets that count
};

Samples part_of(const Samples& samples, int64_t first, int64_t count);
Samples on_device(const Samples& samples, at::Device device);

struct Trainee {
  std::shared_ptr<torch::nn::Module> module;
  std::shared_ptr<models::CausalLMImpl> text;  // the same; null where it is no language model
  WrapPolicy blocks;
  WrapPolicy feed_forwards;  // of the blocks; none where they have no wide product inside
  std::function<at::Tensor(const Samples&)> loss_sum;
  double flops_per_sample = 0;  // forward and backward
  int64_t tokens_per_sample = 0;
  int64_t parameters = 0;
  std::string title;  // "Llama, 3.4M parameters"
};

// Parameters have the values of `seed` that torch::manual_seed was given. `vocab`: the tokenizer's.
Trainee make_trainee(const Config& config, int64_t vocab);

// The same where all values will be loaded: deferred, and without drawing a random number.
Trainee make_unfilled_trainee(const Config& config, int64_t vocab);

}  // namespace fsdp::train
