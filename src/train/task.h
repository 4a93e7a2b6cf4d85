// TrainTask: any model in the form that the loop needs: a module, and a loss that is a sum over the
// targets that count, so that the mean over all ranks and micro-batches is exact.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/context_parallel.h"
#include "fsdp/init_parameters.h"
#include "fsdp/models.h"
#include "fsdp/nn/lora.h"
#include "fsdp/wrap.h"
#include "train/config.h"
#include "train/mixtures.h"

namespace fsdp::train {

struct Samples {         // a rank's part of a batch, or some of it
  at::Tensor inputs;     // int64 [samples, seq or a part of it], or float [samples, width]
  at::Tensor targets;    // likewise; -100 doesn't count
  at::Tensor documents;  // int64 [samples, seq], their numbers; undefined: one document
  int64_t room = 0;      // for documents in a sample
  at::Tensor lengths;    // of a micro-batch: cumulative lengths of its documents, or undefined
  int64_t count = 0;     // samples
  int64_t counted = 0;   // targets that count
};

Samples part_of(const Samples& samples, int64_t first, int64_t count);
// Parts of `micro_batch` samples each, and the rest; 0: all samples in one. With lengths.
std::vector<Samples> micro_batches_of(const Samples& samples, int64_t micro_batch);
Samples on_device(const Samples& samples, at::Device device);

struct TrainTask {
  std::shared_ptr<torch::nn::Module> module;
  std::shared_ptr<models::CausalLMImpl> text;  // the same; null if it isn't a language model
  WrapPolicy blocks;
  WrapPolicy feed_forwards;  // of the blocks; empty if they have none
  InitRule initial;          // how its parameters start
  std::function<at::Tensor(const Samples&)> loss_sum;
  // Beside losses, numbers of a step that losses add up: those of train/preference.h, else those of
  // train/mixtures.h. Null: none.
  std::shared_ptr<at::Tensor> tally;
  bool prefers = false;         // the loss is DPO's, and the tally its own
  Mixtures mixtures;            // whose numbers the tally has; empty: none
  double flops_per_sample = 0;  // forward and backward
  int64_t tokens_per_sample = 0;
  int64_t parameters = 0;
  int64_t trained = 0;  // of them: the same, or those of adapters
  std::string title;  // "Llama, 3.4M parameters"
  std::string fp8;    // which linears compute in fp8, and which don't and why; empty: none do
};

// Gives the task a tally on this device, if it has one.
void place_tally(TrainTask& task, at::Device device);

// Of a config whose rank isn't 0.
nn::LoRAOptions lora_options(const nn::LoRAConfig& lora);

// Parameters follow from torch::manual_seed. `vocab`: the tokenizer's size. `context`: whose parts
// of sequences samples have.
TrainTask make_task(const Config& config, int64_t vocab, const Context& context = {});

// The same without values, which will be loaded or set by init_parameters: deferred, and without
// drawing random numbers.
TrainTask make_unfilled_task(const Config& config, int64_t vocab, const Context& context = {});

}  // namespace fsdp::train
