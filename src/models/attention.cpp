// The attention mask and positions of a forward pass, the key-value cache, and the attention call
// that all models share.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <sstream>
#include <string>

#include "base/format.h"
#include "fsdp/error.h"
#include "fsdp/models/causal_lm.h"
#include "fsdp/nn/functional.h"

namespace fsdp::models {
namespace {

std::string shape(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.sizes();
  return text.str();
}

void check_ids(const at::Tensor& ids) {
  if (!ids.defined() || ids.dim() != 2 || ids.scalar_type() != at::kLong)
    throw Error("the ids of a language model aren't an int64 [batch, tokens] tensor.",
                "pass ids.unsqueeze(0) for one sequence; convert other integer types with "
                ".to(at::kLong).");
}

void check_like_ids(const char* name, const at::Tensor& tensor, const at::Tensor& ids) {
  if (tensor.defined() && tensor.sizes() != ids.sizes())
    throw Error(
        formatted("{} of shape {} doesn't match ids of shape {}.", name, shape(tensor), shape(ids)),
        "both must be [batch, tokens]; with a cache, pass the new tokens only.");
}

void check_cache(const KVCache& cache, const TextInputs& inputs, int64_t layers) {
  if (cache.layers() != layers)
    throw Error(
        formatted("a cache of {} layers was passed to a model of {}.", cache.layers(), layers),
        "make it with KVCache(model->layers()).");
  if (cache.tokens() > 0 && cache.batch() != inputs.ids.size(0))
    throw Error(formatted("a cache of {} sequences was passed a batch of {}.", cache.batch(),
                          inputs.ids.size(0)),
                "a cache holds one batch; reset() it before the next.");
  if (inputs.documents.defined())
    throw Error("a cache and documents cannot be used together.",
                "generate without documents, or train without a cache.");
  if (at::GradMode::is_enabled())
    throw Error("a cache was used while gradients are recorded; cached tensors have no gradients.",
                "put a torch::NoGradGuard around generation.");
}

// Padding of all tokens, cached ones first: bool [batch, past + tokens], or undefined.
at::Tensor whole_padding(const TextInputs& inputs) {
  at::Tensor padding = inputs.padding;
  if (padding.defined()) padding = padding.to(inputs.ids.device(), at::kBool);
  const KVCache* cache = inputs.cache;
  if (!cache || (!padding.defined() && !cache->padding.defined())) return padding;
  auto real = [&](int64_t tokens) {
    return at::ones({inputs.ids.size(0), tokens}, inputs.ids.options().dtype(at::kBool));
  };
  // Cut to length: a failed pass may have left more.
  at::Tensor before = cache->padding.defined() ? cache->padding.slice(1, 0, cache->tokens())
                                               : real(cache->tokens());
  if (!padding.defined()) padding = real(inputs.ids.size(1));
  return at::cat({before, padding}, 1);
}

}  // namespace

Attending plan_attention(const TextInputs& inputs, int64_t layers, int64_t max_tokens) {
  const at::Tensor& ids = inputs.ids;
  check_ids(ids);
  check_like_ids("padding", inputs.padding, ids);
  check_like_ids("documents", inputs.documents, ids);
  if (inputs.cache) check_cache(*inputs.cache, inputs, layers);
  int64_t past = inputs.cache ? inputs.cache->tokens() : 0;
  int64_t tokens = ids.size(1), all = past + tokens;
  if (max_tokens > 0 && all > max_tokens)
    throw Error(formatted("a sequence of {} tokens was passed to a model with {} positions.", all,
                          max_tokens),
                "shorten the sequence, or give the model more positions.");

  Attending plan{.past = past, .cache = inputs.cache};
  at::Tensor padding = whole_padding(inputs);
  if (plan.cache) plan.cache->padding = padding;
  // New tokens must not see later new tokens, and the operator's own causal mask would start at the
  // first cached key.
  bool some_unseen = past > 0 && tokens > 1;
  if (!padding.defined() && !inputs.documents.defined() && !some_unseen) return plan;

  at::Tensor keys = at::arange(all, ids.options());                         // [all]
  at::Tensor queries = at::arange(past, all, ids.options()).view({-1, 1});  // [tokens, 1]
  plan.mask = (keys <= queries).view({1, 1, tokens, all});
  if (inputs.documents.defined()) {
    at::Tensor documents = inputs.documents.to(ids.device());
    plan.mask =
        plan.mask.logical_and(documents.unsqueeze(1).eq(documents.unsqueeze(2)).unsqueeze(1));
  }
  if (padding.defined()) {
    at::Tensor itself = keys.eq(queries).view({1, 1, tokens, all});
    plan.mask = plan.mask.logical_and(padding.view({-1, 1, 1, all}).logical_or(itself));
    plan.positions = (padding.cumsum(1) - 1).clamp_min(0).slice(1, past);
  }
  return plan;
}

at::Tensor attend(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                  const Attending& plan, int64_t layer, const AttendOptions& options) {
  bool causal = !plan.mask.defined() && plan.past == 0;
  KVCache::KeysValues seen = {keys, values};
  if (plan.cache) seen = plan.cache->append(layer, keys, values);
  return nn::attention(queries, seen.first, seen.second,
                       {.causal = causal,
                        .mask = plan.mask,
                        .dropout = options.dropout,
                        .scale = options.scale,
                        .window = options.window});
}

// --- the cache ---

KVCache::KVCache(int64_t layers) : layers_(layers < 0 ? 0 : layers) {}

int64_t KVCache::batch() const {
  return tokens_ > 0 && !layers_.empty() ? layers_[0].first.size(0) : 0;
}

void KVCache::reset() {
  tokens_ = 0;
  padding.reset();
}

KVCache::KeysValues KVCache::append(int64_t layer, const at::Tensor& keys,
                                    const at::Tensor& values) {
  c10::InferenceMode normal(false);  // the cache may be written outside of inference mode
  at::NoGradGuard no_grad;
  int64_t all = tokens_ + keys.size(2);
  auto put = [&](at::Tensor& kept, const at::Tensor& added) {
    bool fits = kept.defined() && kept.size(2) >= all && kept.size(0) == added.size(0) &&
                kept.dtype() == added.dtype() && kept.device() == added.device();
    if (!fits) {  // double the capacity, so appending one token at a time rarely copies
      int64_t room = std::max<int64_t>(64, 2 * all);
      at::Tensor larger =
          at::empty({added.size(0), added.size(1), room, added.size(3)}, added.options());
      if (tokens_ > 0) larger.narrow(2, 0, tokens_).copy_(kept.narrow(2, 0, tokens_));
      kept = larger;
    }
    kept.narrow(2, tokens_, added.size(2)).copy_(added);
    return kept.narrow(2, 0, all);
  };
  auto& [kept_keys, kept_values] = layers_.at(layer);
  return {put(kept_keys, keys), put(kept_values, values)};
}

}  // namespace fsdp::models
