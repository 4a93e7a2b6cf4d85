/// @file
/// Recomputation (activation checkpointing): backward recomputes what it needs of a module instead
/// of keeping it, or keeps it in host memory. The module doesn't change.
///
///     auto sharded = fsdp::fully_shard(model, {.wrap = fsdp::wrap::modules<Block>()});
///     fsdp::apply_activation_checkpointing(sharded, fsdp::wrap::modules<Block>());
///
/// Or for a piece of code, sharded or not:
///
///     at::Tensor y = fsdp::recompute([&](const at::Tensor& x) { return mix(x); }, x);
///
/// Gradients have the same bits as without it (on a GPU with deterministic algorithms).
/// docs/recompute.md explains what is kept and why.
#pragma once

#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "fsdp/fully_shard.h"
#include "fsdp/wrap.h"

namespace fsdp {

/// What a region keeps between forward and backward.
enum class Recompute {
  FULL,          ///< Its inputs.
  SELECTIVE,     ///< Its inputs and the results of matrix products, convolutions and attention.
  OFFLOAD,       ///< Everything, in host memory. Recomputes nothing.
  FULL_OFFLOAD,  ///< Its inputs, in host memory.
};

/// Options of RecomputePolicy.
struct RecomputeOptions {
  Recompute mode = Recompute::FULL;  ///< What regions keep.
  int every = 1;  ///< Take every k-th module that the policy chooses, beginning with the first.

  /// The last k modules aren't recomputed: backward reaches them first, while the memory that its
  /// gradients will need is still free.
  int keep_last = 0;
};

/// Which modules are recomputed, and how: a wrap policy, or a function of a ModuleView that returns
/// bool or std::optional<Recompute>.
class RecomputePolicy {
 public:
  /// A module's mode if it is recomputed, else nullopt.
  using Decision = std::optional<Recompute>;

  /// From a wrap policy. Converts implicitly.
  RecomputePolicy(WrapPolicy modules, RecomputeOptions options = {});  // NOLINT: meant to convert

  /// From a function that returns bool. Converts implicitly.
  template <typename F>
  requires(std::invocable<const F&, const ModuleView&>&&
               std::is_same_v<std::invoke_result_t<const F&, const ModuleView&>, bool>)
      RecomputePolicy(F decide, RecomputeOptions options = {})  // NOLINT
      : RecomputePolicy(WrapPolicy(std::move(decide)), options) {}

  /// From a function that returns Decision. Converts implicitly.
  template <typename F>
  requires(std::invocable<const F&, const ModuleView&>&&
               std::is_same_v<std::invoke_result_t<const F&, const ModuleView&>, Decision>)
      RecomputePolicy(F decide)
      : decide_(std::move(decide)) {}  // NOLINT

  /// Asks the policy about a module.
  Decision operator()(const ModuleView& module) const { return decide_(module); }
  /// RecomputeOptions::every.
  int every() const { return every_; }
  /// RecomputeOptions::keep_last.
  int keep_last() const { return keep_last_; }

 private:
  std::function<Decision(const ModuleView&)> decide_;
  int every_ = 1, keep_last_ = 0;
};

/// Makes regions of the modules that the policy chooses.
///
/// A region lasts from the first use of one of the module's parameters to the first use of another
/// module's. Of nested modules the outer one is taken, and the model itself only if nothing inside
/// it is. A second call replaces the first. Call it before or after fully_shard(), but not between
/// a forward and its backward.
void apply_activation_checkpointing(const Sharded& model, const RecomputePolicy& policy);
/// The same for a module that needn't be sharded.
void apply_activation_checkpointing(const ModuleRef& model, const RecomputePolicy& policy);
/// Ends it.
void remove_activation_checkpointing(const Sharded& model);
/// Ends it.
void remove_activation_checkpointing(const ModuleRef& model);

/// While alive, this thread's operators belong to one region. Scopes may be nested; what an inner
/// scope returns is kept while the outer one reads it.
class RecomputeScope {
 public:
  /// Begins the region.
  explicit RecomputeScope(Recompute mode = Recompute::FULL);
  /// Ends it.
  ~RecomputeScope();
  RecomputeScope(const RecomputeScope&) = delete;
  RecomputeScope& operator=(const RecomputeScope&) = delete;

 private:
  size_t depth_ = 0;
};

/// Returns fn(inputs…) and recomputes its intermediate results in backward.
template <typename F, typename... Inputs>
requires(std::invocable<F, Inputs...>) auto recompute(Recompute mode, F&& fn, Inputs&&... inputs) {
  RecomputeScope scope(mode);
  return std::invoke(std::forward<F>(fn), std::forward<Inputs>(inputs)...);
}

/// The same with Recompute::FULL.
template <typename F, typename... Inputs>
requires(std::invocable<F, Inputs...>) auto recompute(F&& fn, Inputs&&... inputs) {
  return recompute(Recompute::FULL, std::forward<F>(fn), std::forward<Inputs>(inputs)...);
}

/// Returns module(x), computed `tile` rows at a time and recomputed tile by tile in backward.
///
/// For modules and functions that treat every row alone, such as a feed-forward. Only one tile of
/// their intermediate results exists at a time. Gradients of weights are summed over the tiles;
/// fsdp::nn layers add theirs in place, in the dtype of the reduction.
///
///     at::Tensor y = fsdp::tiled(mlp, x, 4096);  // x: [batch, tokens, dim]
///
/// `module` gets [rows, dim] and returns [rows, ..]; the result has the leading dimensions of x.
at::Tensor tiled(const std::function<at::Tensor(const at::Tensor&)>& module, const at::Tensor& x,
                 int64_t tile);

}  // namespace fsdp
