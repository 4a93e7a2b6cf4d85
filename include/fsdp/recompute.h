// Recomputation (activation checkpointing): what backward needs of a module is computed again
// instead of being kept, or kept in host memory, without changing the module.
//
//   auto sharded = fsdp::fully_shard(model, {.wrap = fsdp::wrap::modules<Block>()});
//   fsdp::apply_activation_checkpointing(sharded, fsdp::wrap::modules<Block>());
//
// or, for a piece of code, sharded or not:
//
//   at::Tensor y = fsdp::recompute([&](const at::Tensor& x) { return mix(x); }, x);
//
// Gradients are bit for bit those of a run without it (on a GPU with deterministic algorithms).
// docs/recompute.md says what is kept and why.
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

enum class Recompute {
  FULL,       // keeps a region's inputs
  SELECTIVE,  // and the results of matrix products, convolutions and attention
  OFFLOAD,    // computes nothing again: what backward needs waits in host memory
};

struct RecomputeOptions {
  Recompute mode = Recompute::FULL;
  int every = 1;  // every k-th of the modules that the policy takes, beginning with the first
  // So many of them at the end are left alone: backward needs them first, before its gradients have
  // taken the memory that they would.
  int keep_last = 0;
};

// Which modules, and how: a policy of wrap.h, or a function of a ModuleView that gives bool or
// std::optional<Recompute>.
class RecomputePolicy {
 public:
  using Decision = std::optional<Recompute>;

  RecomputePolicy(WrapPolicy modules, RecomputeOptions options = {});  // NOLINT: meant to convert

  template <typename F>
  requires(std::invocable<const F&, const ModuleView&>&&
               std::is_same_v<std::invoke_result_t<const F&, const ModuleView&>, bool>)
      RecomputePolicy(F decide, RecomputeOptions options = {})  // NOLINT
      : RecomputePolicy(WrapPolicy(std::move(decide)), options) {}

  template <typename F>
  requires(std::invocable<const F&, const ModuleView&>&&
               std::is_same_v<std::invoke_result_t<const F&, const ModuleView&>, Decision>)
      RecomputePolicy(F decide)
      : decide_(std::move(decide)) {}  // NOLINT

  Decision operator()(const ModuleView& module) const { return decide_(module); }
  int every() const { return every_; }
  int keep_last() const { return keep_last_; }

 private:
  std::function<Decision(const ModuleView&)> decide_;
  int every_ = 1, keep_last_ = 0;
};

// From now on the modules that the policy takes are regions: each from the first use of a parameter
// of it to the first use of another module's parameter. Of modules inside each other the outer one
// is taken; the model itself only where nothing in it is. A second call replaces the first. May be
// called before or after fully_shard, but not between a forward and its backward.
void apply_activation_checkpointing(const Sharded& model, const RecomputePolicy& policy);
void apply_activation_checkpointing(const ModuleRef& model, const RecomputePolicy& policy);
void remove_activation_checkpointing(const Sharded& model);
void remove_activation_checkpointing(const ModuleRef& model);

// While alive, this thread's operators belong to one region. Scopes may lie inside each other:
// what an inner one reads and what it hands out is kept.
class RecomputeScope {
 public:
  explicit RecomputeScope(Recompute mode = Recompute::FULL);
  ~RecomputeScope();
  RecomputeScope(const RecomputeScope&) = delete;
  RecomputeScope& operator=(const RecomputeScope&) = delete;

 private:
  size_t depth_ = 0;
};

// fn(inputs…), whose intermediate results are computed again in backward.
template <typename F, typename... Inputs>
requires(std::invocable<F, Inputs...>) auto recompute(Recompute mode, F&& fn, Inputs&&... inputs) {
  RecomputeScope scope(mode);
  return std::invoke(std::forward<F>(fn), std::forward<Inputs>(inputs)...);
}

template <typename F, typename... Inputs>
requires(std::invocable<F, Inputs...>) auto recompute(F&& fn, Inputs&&... inputs) {
  return recompute(Recompute::FULL, std::forward<F>(fn), std::forward<Inputs>(inputs)...);
}

}  // namespace fsdp
