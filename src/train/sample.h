// Text from a language model: the next token drawn from its logits, again and again, with the keys
// and values of what was read before kept.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "fsdp/models.h"

namespace fsdp::train {

struct SampleOptions {
  double temperature = 0.8;  // 0: always the likeliest token
  int64_t top_k = 0;         // only the k likeliest; 0: all
  double top_p = 1.0;        // only the likeliest that together have this probability
  uint64_t seed = 1;
  int64_t tokens = 200;
};

// An Error that names the field which is out of range.
void check(const SampleOptions& options);

// Draws from logits of one position. logits: [vocab]
int64_t draw(const at::Tensor& logits, const SampleOptions& options, at::Generator& random);

// Continues `prompt` (at least one token). `on_token` gets each new one and says whether to go on.
// `agree` may replace a token before it is used: ranks of a sharded model must all go on with the
// same one. The model computes on `device`, in eval mode and without gradients.
void generate(models::CausalLMImpl& model, at::Device device, std::vector<int64_t> prompt,
              const SampleOptions& options, const std::function<bool(int64_t)>& on_token,
              const std::function<int64_t(int64_t)>& agree = {});

}  // namespace fsdp::train
