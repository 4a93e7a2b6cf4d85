/// @file
/// Attention by a pattern of blocks: what a token doesn't see is neither computed nor kept.
///
///     // The first 64 tokens and the last 1024, in blocks of 128 tokens.
///     nn::BlockPattern pattern = nn::global_and_window(64, 1024);
///     at::Tensor out = nn::block_attention(q, k, v, pattern);
///
/// Or a pattern of your own, here the even blocks before a token's own:
///
///     nn::BlockPattern pattern{
///         .block = 128,
///         .sees =
///             [](int64_t row, int64_t column) {
///               if (column > row || (row - column) % 2 != 0) return nn::Sees::kNone;
///               return column < row ? nn::Sees::kAll : nn::Sees::kSome;
///             },
///         .mask = [](const at::Tensor& queries,
///                    const at::Tensor& keys) { return keys.le(queries); }};
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>

namespace fsdp::nn {

/// What the queries of a block see of a block of keys.
enum class Sees {
  kNone,  ///< Nothing: the pair costs nothing.
  kSome,  ///< What BlockPattern::mask says.
  kAll,   ///< Everything.
};

/// Which keys each query sees, by blocks.
struct BlockPattern {
  /// Tokens in a block, of queries and of keys. The last one may be shorter.
  int64_t block = 128;

  /// Of a block of queries and a block of keys, both counted from 0. Called once per pair and call
  /// of block_attention().
  std::function<Sees(int64_t row, int64_t column)> sees;

  /// Of the blocks seen in part: bool [queries, keys], true where the key is seen. Positions are
  /// int64 [queries, 1] and [1, keys], on the device. Empty if no block is seen in part.
  std::function<at::Tensor(const at::Tensor& queries, const at::Tensor& keys)> mask = {};
};

/// A token sees all before it and itself.
BlockPattern causal_pattern(int64_t block = 128);
/// A token sees `window` tokens, the last of them itself, and the first `global` tokens as far as
/// they are before it.
BlockPattern global_and_window(int64_t global, int64_t window, int64_t block = 128);

/// softmax(q · k · scale) · v over the keys that `pattern` keeps, each [batch, heads, tokens,
/// head_dim]. A query that sees nothing gets zeros.
///
/// The heads of k and v may be fewer by a whole factor. Default of `scale`: 1 / sqrt(head_dim).
/// Time grows with the blocks that are kept, memory with the tokens. It runs on the kernels of
/// torch's flash attention on the CPU and of its memory-efficient attention on CUDA, one block of
/// queries at a time.
at::Tensor block_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const BlockPattern& pattern, std::optional<double> scale = {});

}  // namespace fsdp::nn
