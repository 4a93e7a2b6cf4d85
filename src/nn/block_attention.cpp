// Attention by a pattern of blocks. Each block of queries is one call of an attention kernel with
// the keys that it sees. Heads that share keys are further rows of queries, so that keys aren't
// repeated. Forward keeps queries, keys, values, the result and a number per row; backward finds
// masks anew.
#include "fsdp/nn/block_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "base/format.h"
#include "fsdp/error.h"
#include "nn/node.h"

namespace fsdp::nn {
namespace {

struct Stretch {  // neighbouring keys
  int64_t first, count;
  bool masked;
};

struct Row {  // a block of queries
  int64_t first, count;
  std::vector<Stretch> keys;
};

std::vector<Row> kept_blocks(const BlockPattern& pattern, int64_t queries, int64_t keys) {
  std::vector<Row> rows;
  for (int64_t first = 0; first < queries; first += pattern.block) {
    Row row{first, std::min(pattern.block, queries - first), {}};
    for (int64_t key = 0; key < keys; key += pattern.block) {
      const Sees sees = pattern.sees(first / pattern.block, key / pattern.block);
      if (sees == Sees::kNone) continue;
      const bool masked = sees == Sees::kSome;
      const int64_t count = std::min(pattern.block, keys - key);
      if (!row.keys.empty() && row.keys.back().masked == masked &&
          row.keys.back().first + row.keys.back().count == key)
        row.keys.back().count += count;
      else
        row.keys.push_back({key, count, masked});
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

// What one call of a kernel sees. [batch, kv heads, rows · group or keys, head_dim]
struct Call {
  at::Tensor q, k, v;
  std::optional<at::Tensor> mask;  // added to the scores
};

class BlockAttention {
 public:
  BlockAttention(const BlockPattern& pattern, const at::Tensor& q, const at::Tensor& k,
                 std::optional<double> scale)
      : pattern_(pattern),
        rows_(kept_blocks(pattern, q.size(2), k.size(2))),
        group_(q.size(1) / k.size(1)),
        scale_(scale.value_or(1 / std::sqrt(static_cast<double>(q.size(3))))) {}

  // Fills `out` and returns the log-sum-exps of each row.
  Tensors forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const at::Tensor& out) const {
    Tensors sums;
    for (const Row& row : rows_) {
      if (row.keys.empty()) {
        out.narrow(2, row.first, row.count).zero_();
        sums.emplace_back();
        continue;
      }
      const Call call = call_of(row, q, k, v);
      auto [made, sum] = q.is_cuda() ? on_cuda(call) : on_cpu(call);
      out.narrow(2, row.first, row.count).copy_(by_head(made));
      sums.push_back(sum);
    }
    return sums;
  }

  // The gradients of q, k and v.
  Tensors backward(const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k,
                   const at::Tensor& v, const at::Tensor& out, const Tensors& sums) const {
    // Every block of queries adds to the gradients of keys, so half precision would lose them.
    const bool half = q.scalar_type() == at::kBFloat16 || q.scalar_type() == at::kHalf;
    const auto sum_type = half ? at::kFloat : q.scalar_type();
    const at::Tensor to_q = at::zeros(q.sizes(), q.options());
    const at::Tensor to_k = at::zeros(k.sizes(), k.options().dtype(sum_type)),
                     to_v = at::zeros(v.sizes(), v.options().dtype(sum_type));
    for (size_t i = 0; i < rows_.size(); ++i) {
      const Row& row = rows_[i];
      if (row.keys.empty()) continue;
      const Call call = call_of(row, q, k, v);
      const at::Tensor row_grad = queries_of(row, grad), row_out = queries_of(row, out);
      const auto made = q.is_cuda() ? back_on_cuda(call, row_grad, row_out, sums[i])
                                    : back_on_cpu(call, row_grad, row_out, sums[i]);
      to_q.narrow(2, row.first, row.count).copy_(by_head(made[0]));
      int64_t at = 0;
      for (const Stretch& keys : row.keys) {
        to_k.narrow(2, keys.first, keys.count).add_(made[1].narrow(2, at, keys.count));
        to_v.narrow(2, keys.first, keys.count).add_(made[2].narrow(2, at, keys.count));
        at += keys.count;
      }
    }
    return {to_q, to_k.to(k.scalar_type()), to_v.to(v.scalar_type())};
  }

 private:
  // [batch, heads, tokens, head_dim] → [batch, kv heads, group · count, head_dim]
  at::Tensor queries_of(const Row& row, const at::Tensor& x) const {
    return x.narrow(2, row.first, row.count).unflatten(1, {-1, group_}).flatten(2, 3);
  }
  at::Tensor by_head(const at::Tensor& rows) const {  // and back
    return rows.unflatten(2, {group_, -1}).flatten(1, 2);
  }

  Call call_of(const Row& row, const at::Tensor& q, const at::Tensor& k,
               const at::Tensor& v) const {
    auto seen = [&](const at::Tensor& x) {
      Tensors parts;
      for (const Stretch& keys : row.keys) parts.push_back(x.narrow(2, keys.first, keys.count));
      return parts.size() == 1 ? parts[0] : at::cat(parts, 2);
    };
    return {queries_of(row, q), seen(k), seen(v), mask_of(row, q)};
  }

  // [batch, kv heads, group · count, keys], a view of [count, keys] if heads share no keys.
  std::optional<at::Tensor> mask_of(const Row& row, const at::Tensor& q) const {
    auto masked = [](const Stretch& keys) { return keys.masked; };
    if (std::none_of(row.keys.begin(), row.keys.end(), masked)) return std::nullopt;
    auto positions = [&](int64_t first, int64_t count) {
      return at::arange(first, first + count,
                        at::TensorOptions().dtype(at::kLong).device(q.device()));
    };
    int64_t all = 0, at = 0;
    for (const Stretch& keys : row.keys) all += keys.count;
    // Rows of a multiple of 16 elements, which kernels on CUDA need.
    const at::Tensor added =
        at::zeros({row.count, (all + 15) / 16 * 16}, q.options()).narrow(1, 0, all);
    const at::Tensor queries = positions(row.first, row.count).unsqueeze(1);
    for (const Stretch& keys : row.keys) {
      if (keys.masked) {
        const at::Tensor kept = pattern_.mask(queries, positions(keys.first, keys.count));
        added.narrow(1, at, keys.count)
            .masked_fill_(kept.logical_not(), -std::numeric_limits<double>::infinity());
      }
      at += keys.count;
    }
    const at::Tensor grouped = group_ == 1 ? added : added.repeat({group_, 1});
    return grouped.expand({q.size(0), q.size(1) / group_, row.count * group_, all});
  }

  std::tuple<at::Tensor, at::Tensor> on_cpu(const Call& call) const {
    return at::_scaled_dot_product_flash_attention_for_cpu(call.q, call.k, call.v, /*dropout_p=*/0,
                                                           /*is_causal=*/false, call.mask, scale_);
  }
  std::array<at::Tensor, 3> back_on_cpu(const Call& call, const at::Tensor& grad,
                                        const at::Tensor& out, const at::Tensor& sum) const {
    auto [q, k, v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        grad, call.q, call.k, call.v, out, sum, /*dropout_p=*/0, /*is_causal=*/false, call.mask,
        scale_);
    return {q, k, v};
  }

  std::tuple<at::Tensor, at::Tensor> on_cuda(const Call& call) const {
    auto [out, sum, seed, offset] = at::_scaled_dot_product_efficient_attention(
        call.q, call.k, call.v, call.mask, /*compute_log_sumexp=*/true, /*dropout_p=*/0,
        /*is_causal=*/false, scale_);
    return {out, sum};
  }
  std::array<at::Tensor, 3> back_on_cuda(const Call& call, const at::Tensor& grad,
                                         const at::Tensor& out, const at::Tensor& sum) const {
    const at::Tensor unused = at::empty({}, at::TensorOptions(at::kLong));  // seeds of dropout
    auto [q, k, v, mask] = at::_scaled_dot_product_efficient_attention_backward(
        grad, call.q, call.k, call.v, call.mask.value_or(at::Tensor()), out, sum, unused, unused,
        /*dropout_p=*/0, {true, true, true, false}, /*is_causal=*/false, scale_);
    return {q, k, v};
  }

  BlockPattern pattern_;
  std::vector<Row> rows_;
  int64_t group_;
  double scale_;
};

// Inputs: q, k, v. Saved: the same, the result, and the log-sum-exps of each block of queries.
struct BlockAttentionNode : Node {
  std::optional<BlockAttention> work;

  std::string name() const override { return "fsdp::block_attention"; }

  Tensors backward(const Tensors& gradients) override {
    const Tensors kept = saved();
    return work->backward(gradients[0], kept[0], kept[1], kept[2], kept[3],
                          {kept.begin() + 4, kept.end()});
  }
};

void check_inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const BlockPattern& pattern) {
  const bool shapes = q.dim() == 4 && k.dim() == 4 && v.sizes() == k.sizes() &&
                      q.size(0) == k.size(0) && q.size(3) == k.size(3) && k.size(1) > 0 &&
                      q.size(1) % k.size(1) == 0;
  if (!shapes)
    throw Error("block_attention was passed queries, keys and values that don't fit each other.",
                "pass [batch, heads, tokens, head_dim]; keys and values may have fewer heads, by a "
                "whole factor.");
  if (pattern.block < 1 || !pattern.sees)
    throw Error("block_attention was passed a pattern without blocks.",
                "set BlockPattern::block to at least 1, and BlockPattern::sees.");
  if (!q.is_cpu() && !q.is_cuda() && !q.is_meta())
    throw Error(formatted("block_attention has no kernel for {}.", q.device().str()),
                "use the CPU or CUDA.");
  if (q.is_cuda() && (q.scalar_type() == at::kDouble || q.size(3) % 8 != 0))
    throw Error("block_attention on CUDA needs fp32, fp16 or bf16 and a head_dim that 8 divides.",
                "use another dtype or head_dim, or attention() with a mask.");
}

}  // namespace

BlockPattern causal_pattern(int64_t block) {
  return {
      .block = block,
      .sees =
          [](int64_t row, int64_t column) {
            return column < row ? Sees::kAll : column == row ? Sees::kSome : Sees::kNone;
          },
      .mask = [](const at::Tensor& queries, const at::Tensor& keys) { return keys.le(queries); }};
}

BlockPattern global_and_window(int64_t global, int64_t window, int64_t block) {
  if (global < 0 || window < 1 || block < 1)
    throw Error(formatted("a pattern can't have {} global tokens, a window of {} and blocks of {}.",
                          global, window, block),
                "a window has at least 1 token, which is the query's own, and so does a block.");
  const auto sees = [=](int64_t row, int64_t column) {
    if (column > row) return Sees::kNone;
    // The last key is at most this far behind a query: of the last query, and of the first one.
    const int64_t farthest = (row - column + 1) * block - 1,
                  nearest = (row - column - 1) * block + 1;
    const bool last_is_global = (column + 1) * block <= global;
    if (column < row && (farthest < window || last_is_global)) return Sees::kAll;
    return nearest < window || column * block < global ? Sees::kSome : Sees::kNone;
  };
  const auto mask = [=](const at::Tensor& queries, const at::Tensor& keys) {
    const at::Tensor near = (queries - keys).lt(window).logical_or(keys.lt(global));
    return keys.le(queries).logical_and(near);
  };
  return {.block = block, .sees = sees, .mask = mask};
}

at::Tensor block_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const BlockPattern& pattern, std::optional<double> scale) {
  check_inputs(q, k, v, pattern);
  const BlockAttention work(pattern, q, k, scale);
  at::Tensor out;
  Tensors sums;
  {
    Unrecorded unrecorded;
    // Heads of a token adjacent, as flash attention's are.
    out = at::empty({q.size(0), q.size(2), q.size(1), q.size(3)}, q.options()).transpose(1, 2);
    sums = work.forward(q, k, v, out);
  }
  if (auto node = record<BlockAttentionNode>({q, k, v})) {
    node->work = work;
    Tensors kept{q, k, v, out.tensor_data()};
    kept.insert(kept.end(), sums.begin(), sums.end());
    node->save(kept);
    node->returns(out);
  }
  return out;
}

}  // namespace fsdp::nn
