#include "nn/window.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <algorithm>
#include <string>
#include <vector>

#include "fsdp/error.h"
#include "nn/flash.h"

namespace fsdp::nn {
namespace {

// Queries of a block. A block costs rows · (rows + window) scores, so rows are at most about as
// many as the window's, and enough for a matrix product to be worth it.
constexpr int64_t kFewestRows = 64, kMostRows = 256;

// [rows, before + rows]: which columns each row sees. Row i is the token of column before + i.
at::Tensor band(int64_t rows, int64_t before, int64_t window, const at::Tensor& like) {
  auto options = at::TensorOptions().dtype(at::kBool).device(like.device());
  return at::ones({rows, before + rows}, options).tril(before).triu(before - window + 1);
}

// The part of a mask [.., queries, keys] for some of both. A dimension of 1 serves all.
at::Tensor part_of(const at::Tensor& mask, int64_t query, int64_t queries, int64_t key,
                   int64_t keys) {
  at::Tensor part = mask.size(-2) == 1 ? mask : mask.narrow(-2, query, queries);
  return part.size(-1) == 1 ? part : part.narrow(-1, key, keys);
}

at::Tensor masked(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const at::Tensor& mask, const AttentionOptions& options) {
  auto seen = mask.defined() ? std::optional(mask) : std::nullopt;
  return at::scaled_dot_product_attention(q, k, v, seen, options.dropout, /*is_causal=*/false,
                                          options.scale, /*enable_gqa=*/k.size(1) != q.size(1));
}

// All queries in one block: few, or after tokens in a cache.
at::Tensor one_block(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const AttentionOptions& options) {
  int64_t tokens = q.size(2), past = k.size(2) - tokens;
  int64_t before = std::min(past, options.window - 1), keys = before + tokens;
  at::Tensor seen;
  if (tokens > 1) seen = band(tokens, before, options.window, q);
  if (options.mask.defined()) {
    at::Tensor given = part_of(options.mask, 0, tokens, past - before, keys);
    seen = seen.defined() ? given.logical_and(seen) : given;
  }
  return masked(q, k.narrow(2, past - before, keys), v.narrow(2, past - before, keys), seen,
                options);
}

at::Tensor blocks(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t rows,
                  const AttentionOptions& options) {
  // Splits and concatenations, because backward of a slice would fill the whole for each block.
  std::vector<at::Tensor> queries = q.split(rows, 2), keys = k.split(rows, 2),
                          values = v.split(rows, 2), outs;
  const int64_t back = (options.window - 1 + rows - 1) / rows;  // blocks of keys before its own
  const at::Tensor whole = band(rows, back * rows, options.window, q);
  for (int64_t i = 0; i < static_cast<int64_t>(queries.size()); ++i) {
    const int64_t first = std::max<int64_t>(0, i - back), here = queries[i].size(2);
    const int64_t before = (i - first) * rows;
    auto joined = [&](const std::vector<at::Tensor>& parts) {
      return first == i
                 ? parts[i]
                 : at::cat(at::TensorList(parts.data() + first, static_cast<size_t>(i - first + 1)),
                           2);
    };
    at::Tensor seen = whole.narrow(0, 0, here).narrow(1, back * rows - before, before + here);
    if (options.mask.defined())
      seen = part_of(options.mask, i * rows, here, first * rows, before + here).logical_and(seen);
    outs.push_back(masked(queries[i], joined(keys), joined(values), seen, options).transpose(1, 2));
  }
  return at::cat(outs, 1).transpose(1, 2);  // heads of a token adjacent, as flash attention's are
}

}  // namespace

at::Tensor window_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const AttentionOptions& options) {
  if (options.mask.defined() && options.mask.scalar_type() != at::kBool)
    throw Error("attention with a sliding window was passed a mask that isn't bool.",
                "pass a bool mask, true where a key is seen.");
  std::string problem;
  if (at::Tensor out = flash_attention(q, k, v, options, problem); out.defined()) return out;
  const int64_t rows = std::clamp(options.window, kFewestRows, kMostRows);
  const bool few = q.size(2) <= rows || q.size(2) != k.size(2);
  at::Tensor out = few ? one_block(q, k, v, options) : blocks(q, k, v, rows, options);
  give_up_flash(problem);  // the blocks worked, so the inputs are fine
  return out;
}

}  // namespace fsdp::nn
