// Generates text with a language model, token by token, with a key-value cache.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <set>
#include <vector>

#include "fsdp/models.h"

namespace fsdp::train {

struct SampleOptions {
  double temperature = 0.8;  // 0: always the most likely token
  int64_t top_k = 0;         // only the k most likely tokens; 0: all
  double top_p = 1.0;        // only the most likely tokens that reach this total probability
  uint64_t seed = 1;
  int64_t tokens = 200;
};

// Throws Error for a value out of range.
void check(const SampleOptions& options);

// Draws a token from the logits of one position. logits: [vocab]
int64_t draw(const at::Tensor& logits, const SampleOptions& options, at::Generator& random);

// Continues `prompt` (at least one token). `on_token` gets each new token and returns whether to
// continue. `agree` may replace a token before it is used: all ranks of a sharded model must use the
// same one. The model runs on `device`, in eval mode and without gradients.
void generate(models::CausalLMImpl& model, at::Device device, std::vector<int64_t> prompt,
              const SampleOptions& options, const std::function<bool(int64_t)>& on_token,
              const std::function<int64_t(int64_t)>& agree = {});

struct Continuation {
  std::vector<int64_t> tokens;
  bool ended = false;  // by a token of `ends`, which isn't among `tokens`
};

// Continues several prompts together. Each gets what generate() would draw for it with its own
// seed, options.seed + `first` + its place, up to rounding.
std::vector<Continuation> generate_batch(models::CausalLMImpl& model, at::Device device,
                                         const std::vector<std::vector<int64_t>>& prompts,
                                         const SampleOptions& options,
                                         const std::set<int64_t>& ends, uint64_t first = 0);

}  // namespace fsdp::train
