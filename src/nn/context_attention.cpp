// Contexts, and attention by exchanging heads (Ulysses).
#include "nn/context_attention.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>

#include <utility>
#include <vector>

#include "base/format.h"
#include "fsdp/error.h"
#include "nn/exchange.h"
#include "nn/ring.h"

namespace fsdp {

Context::Context(Communicator comm, ContextKind kind) : comm_(std::move(comm)), kind_(kind) {}

int Context::size() const {
  return comm_ ? comm_.size() : 1;
}
int Context::rank() const {
  return comm_ ? comm_.rank() : 0;
}

namespace {

// Where this rank's tokens are in whole sequences.
std::vector<std::pair<int64_t, int64_t>> stretches(int64_t tokens, const Context& context) {
  const int64_t ranks = context.size(), rank = context.rank();
  const int64_t chunks = context.kind() == ContextKind::RING ? 2 * ranks : ranks;
  if (tokens % chunks != 0)
    throw Error(
        formatted("a sequence of {} tokens can't be divided into {} chunks for the {} ranks of a "
                  "context.",
                  tokens, chunks, ranks),
        "pad it to a multiple; targets of -100 don't count.");
  const int64_t chunk = tokens / chunks;
  if (chunks == ranks) return {{rank * chunk, chunk}};
  return {{rank * chunk, chunk}, {(chunks - 1 - rank) * chunk, chunk}};
}

}  // namespace

at::Tensor Context::part(const at::Tensor& whole, int64_t dim) const {
  if (size() == 1) return whole;
  std::vector<at::Tensor> parts;
  for (auto [first, count] : stretches(whole.size(dim), *this))
    parts.push_back(whole.narrow(dim, first, count));
  return parts.size() == 1 ? parts.front() : at::cat(parts, dim);
}

at::Tensor Context::positions(int64_t tokens, at::Device device) const {
  return part(at::arange(tokens, at::TensorOptions().dtype(at::kLong).device(device)), 0);
}

AttentionFunction context_parallel(AttentionFunction attention, Context context) {
  if (context.size() == 1) return attention;
  if (context.kind() == ContextKind::RING)
    throw Error("a ring can't wrap attention: it computes the attention itself.",
                "call nn::attention with the context, or make a context of kind ULYSSES.");
  return [attention = std::move(attention), context = std::move(context)](
             const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    const int64_t ranks = context.size(), kv_heads = k.size(1);
    nn::check_exchange(q.size(1), kv_heads, ranks);
    const auto each = [&](const at::Tensor& x) {  // at least one head per rank
      if (kv_heads % ranks == 0) return x;
      return x.unsqueeze(2).expand({-1, -1, ranks / kv_heads, -1, -1}).flatten(1, 2);
    };
    const auto whole = nn::exchange_to_heads({q, each(k), each(v)}, context);
    return nn::exchange_to_tokens({attention(whole[0], whole[1], whole[2])}, context).front();
  };
}

namespace nn {

bool can_exchange(int64_t heads, int64_t kv_heads, int64_t ranks) {
  return heads % ranks == 0 && (kv_heads % ranks == 0 || ranks % kv_heads == 0);
}

void check_exchange(int64_t heads, int64_t kv_heads, int64_t ranks) {
  if (can_exchange(heads, kv_heads, ranks)) return;
  if (heads % ranks != 0)
    throw Error(
        formatted("{} heads can't be divided among the {} ranks of a context.", heads, ranks),
        "choose a context size that divides the heads, or ContextKind::RING.");
  throw Error(formatted("{} heads of keys can't be divided among the {} ranks of a context, nor "
                        "repeated for them.",
                        kv_heads, ranks),
              "choose a context size that divides the heads of keys or is a multiple of them, or "
              "ContextKind::RING.");
}

at::Tensor context_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const AttentionOptions& options) {
  const Context& context = options.context;
  if (context.kind() == ContextKind::RING) return ring_attention(q, k, v, options);
  AttentionOptions whole = options;
  whole.context = {};
  if (options.mask.defined() && options.mask.dim() == 4 && options.mask.size(1) > 1)
    whole.mask = context.part(options.mask, 1);  // of this rank's heads
  return context_parallel(
      [&whole](const at::Tensor& all_q, const at::Tensor& all_k, const at::Tensor& all_v) {
        return attention(all_q, all_k, all_v, whole);
      },
      context)(q, k, v);
}

}  // namespace nn
}  // namespace fsdp
