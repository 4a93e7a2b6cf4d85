/// @file
/// Context parallelism: each rank of a group has a part of every sequence.
///
///     DeviceMesh mesh(world, {{"shard", 2}, {"context", 4}});
///     auto sharded = fsdp::fully_shard(model, {.mesh = mesh});  // over all 8 ranks
///     Context context(mesh.comm("context"));
///     at::Tensor loss = model->loss_sum({.ids = context.part(ids), .context = context},
///                                       context.part(targets));
///
/// Only attention needs other ranks' tokens. fsdp::nn::attention() and the models of fsdp::models
/// take the context as an option; context_parallel() is for attention of your own.
///
/// A rank's loss is that of its own tokens. Parts are equal, so the mean over ranks is the mean
/// over tokens, and gradients are averaged over ranks as without a context.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "fsdp/communicator.h"

namespace fsdp {

/// How attention sees the tokens of other ranks.
enum class ContextKind {
  ULYSSES,  ///< All-to-alls give each rank whole sequences of some heads, for any attention.
  RING      ///< Keys and values pass by all ranks, in any number of heads; nn::attention() only.
};

/// The ranks that share sequences. A shared handle.
class Context {
 public:
  /// Each rank has whole sequences.
  Context() = default;
  /// The ranks of `comm` share sequences. With ULYSSES rank r has the r-th of equal parts; with
  /// RING it has two of the twice as many chunks, r and 2 · size - 1 - r, so that each rank
  /// computes the same number of causal scores.
  explicit Context(Communicator comm, ContextKind kind = ContextKind::ULYSSES);

  int size() const;                                   ///< Number of ranks that share a sequence.
  int rank() const;                                   ///< This rank's place among them.
  ContextKind kind() const { return kind_; }          ///< How attention sees other tokens.
  const Communicator& comm() const { return comm_; }  ///< Over these ranks.

  /// This rank's part of whole sequences, which lie along `dim`. Throws Error if they can't be
  /// divided equally.
  at::Tensor part(const at::Tensor& whole, int64_t dim = 1) const;
  /// The places of this rank's tokens in sequences of `tokens`: int64.
  at::Tensor positions(int64_t tokens, at::Device device = at::kCPU) const;

  /// Whether sequences are shared at all.
  explicit operator bool() const { return size() > 1; }

 private:
  Communicator comm_;
  ContextKind kind_ = ContextKind::ULYSSES;
};

/// softmax(q · k) · v of any kind: q, k, v [batch, heads, tokens, head_dim] → like q. The heads of
/// k and v may be fewer by a whole factor.
using AttentionFunction =
    std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v)>;

/// `attention` of whole sequences as a function of their parts (Ulysses).
///
/// Before it, an all-to-all gives each rank whole sequences of some heads; after it, another one
/// gives back this rank's tokens of all heads. Backward does the same. A rank sends
/// (1 - 1/size) · (q + k + v + out) elements each way. The size must divide the heads of q; where
/// it is a multiple of the heads of k and v, these are repeated. The calls of the result are
/// collective. Throws Error for a context of another kind.
AttentionFunction context_parallel(AttentionFunction attention, Context context);

}  // namespace fsdp
