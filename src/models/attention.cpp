// The attention mask and positions of a forward pass, the key-value cache, and the attention call
// that all models share.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

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

// `tokens`: of whole sequences.
void check_padding(const at::Tensor& padding, const at::Tensor& ids, int64_t tokens) {
  if (padding.defined() && padding.sizes() != at::IntArrayRef({ids.size(0), tokens}))
    throw Error(
        formatted("padding of shape {} doesn't match ids of shape {}.", shape(padding), shape(ids)),
        "both must be [batch, tokens]; with a cache, pass the new tokens only.");
}

void check_context(const TextInputs& inputs) {
  if (inputs.context && inputs.cache)
    throw Error("a cache and a context cannot be used together.",
                "generate with whole sequences on each rank.");
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

void check_documents(const TextInputs& inputs) {
  const at::Tensor& documents = inputs.documents;
  if (!documents.defined()) return;
  if (documents.dim() != 1 || documents.scalar_type() != at::kInt || documents.numel() < 2)
    throw Error(
        formatted("documents of shape {} aren't cumulative lengths, an int32 [n + 1] tensor.",
                  shape(documents)),
        "make them of numbers [batch, tokens] with cumulative_lengths().");
  if (inputs.padding.defined())
    throw Error("padding and documents cannot be used together.",
                "make the padding of a sequence a document of its own.");
}

// `sizes`: [batch, tokens] of whole sequences.
void restart_positions(Attending& plan, at::IntArrayRef sizes) {
  const int64_t all = sizes[0] * sizes[1];
  const at::Tensor starts = plan.documents.to(at::kLong);
  const at::Tensor own = document_of_token(plan.documents, all);
  const at::Tensor first = starts.index_select(0, own), end = starts.index_select(0, own + 1);
  plan.positions = plan.context.part((at::arange(all, starts.options()) - first).view(sizes));
  plan.lengths = plan.context.part((end - first).view(sizes));
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

at::Tensor cumulative_lengths(const at::Tensor& numbers, int64_t room) {
  if (numbers.dim() != 2 || numbers.scalar_type() != at::kLong || !numbers.is_cpu())
    throw Error("the numbers of documents aren't an int64 [batch, tokens] tensor on the CPU.",
                "number the documents of each sequence.");
  const at::Tensor rows = numbers.contiguous();
  const int64_t* number = rows.const_data_ptr<int64_t>();
  const int64_t all = rows.numel(), tokens = rows.size(1);
  std::vector<int32_t> starts;
  for (int64_t first = 0, row = 1; first < all; first += tokens, ++row) {
    for (int64_t i = first; i < first + tokens; ++i)
      if (i == first || number[i] != number[i - 1]) starts.push_back(static_cast<int32_t>(i));
    const auto most = static_cast<size_t>(row * room);
    if (room > 0 && starts.size() > most)
      throw Error(formatted("there are {} documents in a sequence, but room for {}.",
                            starts.size() - (most - static_cast<size_t>(room)), room),
                  "pass more room; 0 makes as much as they need.");
    if (room > 0) starts.resize(most, static_cast<int32_t>(first + tokens));
  }
  starts.push_back(static_cast<int32_t>(all));
  return at::tensor(starts, at::kInt);
}

// Without waiting for the device, and in the same shapes for all documents. Counts how many begin
// at each token, empty ones included.
at::Tensor document_of_token(const at::Tensor& documents, int64_t tokens) {
  const at::Tensor starts = documents.to(at::kLong);
  at::Tensor begin = at::zeros({tokens + 1}, starts.options());
  begin.scatter_add_(0, starts, at::ones_like(starts));
  return begin.narrow(0, 0, tokens).cumsum(0) - 1;
}

Attending plan_attention(const TextInputs& inputs, int64_t layers, int64_t max_tokens) {
  const at::Tensor& ids = inputs.ids;
  check_ids(ids);
  const int64_t tokens = ids.size(1) * inputs.context.size();
  check_padding(inputs.padding, ids, tokens);
  check_context(inputs);
  check_documents(inputs);
  if (inputs.cache) check_cache(*inputs.cache, inputs, layers);
  int64_t past = inputs.cache ? inputs.cache->tokens() : 0;
  int64_t all = past + tokens;
  if (max_tokens > 0 && all > max_tokens)
    throw Error(formatted("a sequence of {} tokens was passed to a model with {} positions.", all,
                          max_tokens),
                "shorten the sequence, or give the model more positions.");

  Attending plan{.past = past, .end = all, .cache = inputs.cache, .context = inputs.context};
  if (plan.context) plan.positions = plan.context.positions(tokens, ids.device());
  if (inputs.documents.defined()) {
    plan.documents = inputs.documents.to(ids.device());
    if (inputs.restart_positions) restart_positions(plan, {ids.size(0), tokens});
    return plan;
  }
  at::Tensor padding = whole_padding(inputs);
  if (plan.cache) plan.cache->padding = padding;
  // New tokens must not see later new tokens, and the operator's own causal mask would start at the
  // first cached key.
  bool some_unseen = past > 0 && tokens > 1;
  if (!padding.defined() && !some_unseen) return plan;

  at::Tensor keys = at::arange(all, ids.options());                         // [all]
  at::Tensor queries = at::arange(past, all, ids.options()).view({-1, 1});  // [tokens, 1]
  plan.mask = (keys <= queries).view({1, 1, tokens, all});
  if (padding.defined()) {
    at::Tensor itself = keys.eq(queries).view({1, 1, tokens, all});
    plan.mask = plan.mask.logical_and(padding.view({-1, 1, 1, all}).logical_or(itself));
    plan.positions = plan.context.part((padding.cumsum(1) - 1).clamp_min(0).slice(1, past));
  }
  return plan;
}

at::Tensor attend(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                  const Attending& plan, int64_t layer, const AttendOptions& options) {
  const bool causal = !plan.mask.defined() && plan.past == 0;
  KVCache::KeysValues seen = {keys, values};
  if (plan.cache) seen = plan.cache->append(layer, keys, values);
  return nn::attention(queries, seen.first, seen.second,
                       {.causal = causal,
                        .mask = plan.mask,
                        .dropout = options.dropout,
                        .scale = options.scale,
                        .window = options.window,
                        .documents = plan.documents,
                        .context = plan.context});
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
