/// @file
/// Wrap policies: which modules become units.
///
///     .wrap = wrap::modules<Block>()                  by type
///     .wrap = wrap::types({"Block"})                  by the name of the type; TorchScript too
///     .wrap = wrap::names({"layers.*"})               by path: * within a step, ** across steps
///     .wrap = wrap::min_params(1'000'000)             by size
///     .wrap = wrap::always()                          every module with parameters
///     .wrap = [](const ModuleView& m) { return …; }   bool, or std::optional<UnitOptions>
///
/// A parameter belongs to the innermost module that the policy chooses, and otherwise to the root.
#pragma once

#include <torch/nn/module.h>

#include <concepts>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "fsdp/sharding.h"

namespace fsdp {

/// A module as policies see it.
struct ModuleView {
  std::string path;                     ///< "layers.0"; "" is the module being sharded.
  std::string type;                     ///< "Block": its class without namespaces and "Impl".
  torch::nn::Module* module = nullptr;  ///< Null for TorchScript.
  int64_t numel = 0;                    ///< Elements of all parameters in it.
  int64_t remaining = 0;                ///< Elements of those that no unit inside it has taken.
};

/// Chooses the modules that become units, each with options of its own. Children are asked before
/// their parents.
class WrapPolicy {
 public:
  /// A module's options if it becomes a unit, else nullopt.
  using Decision = std::optional<UnitOptions>;

  /// Chooses none: the root is the only unit.
  WrapPolicy() = default;

  /// From a function of a ModuleView that returns bool or Decision. Converts implicitly.
  template <typename F>
  requires(!std::same_as<std::remove_cvref_t<F>, WrapPolicy> &&
           std::invocable<const F&, const ModuleView&>)
      WrapPolicy(F decide) {  // NOLINT: meant to convert
    if constexpr (std::is_same_v<std::invoke_result_t<const F&, const ModuleView&>, bool>) {
      decide_ = [decide = std::move(decide)](const ModuleView& module) {
        return decide(module) ? Decision(UnitOptions{}) : Decision();
      };
    } else {
      decide_ = std::move(decide);
    }
  }

  /// Asks the policy about a module.
  Decision operator()(const ModuleView& module) const {
    return decide_ ? decide_(module) : Decision();
  }
  /// False for a policy that chooses none.
  explicit operator bool() const { return static_cast<bool>(decide_); }

  /// A type or a pattern of paths that the policy looks for, for a warning if no module has it.
  struct Wanted {
    std::string text;                                    ///< As the user wrote it.
    bool is_type = false;                                ///< Or a pattern.
    std::function<bool(const ModuleView&)> matches = {}; ///< Whether a module has it.
  };
  /// What the policy looks for; empty if it isn't known.
  const std::vector<Wanted>& wanted() const { return wanted_; }
  /// The same policy, which looks for these.
  WrapPolicy looking_for(std::vector<Wanted> wanted) && {
    wanted_ = std::move(wanted);
    return std::move(*this);
  }

 private:
  std::function<Decision(const ModuleView&)> decide_;
  std::vector<Wanted> wanted_;
};

/// Ready-made wrap policies. `options` apply to every unit that the policy makes.
namespace wrap {

namespace detail {
template <typename M>
struct Contained {
  using type = M;
};
template <typename M>
requires requires {
  typename M::ContainedType;
}
struct Contained<M> {
  using type = typename M::ContainedType;
};
}  // namespace detail

/// Modules of these types and of types derived from them. Name the holder (Linear) or the module
/// (LinearImpl).
template <typename... Modules>
WrapPolicy modules(UnitOptions options = {}) {
  return [options](const ModuleView& view) -> WrapPolicy::Decision {
    bool is_one = view.module &&
                  (dynamic_cast<typename detail::Contained<Modules>::type*>(view.module) || ...);
    return is_one ? WrapPolicy::Decision(options) : std::nullopt;
  };
}

/// Modules whose ModuleView::type is one of `names`, which may end in "Impl".
WrapPolicy types(std::vector<std::string> names, UnitOptions options = {});
/// Modules whose path matches one of `patterns`. A `*` matches within a step of the path, `**`
/// across steps.
WrapPolicy names(std::vector<std::string> patterns, UnitOptions options = {});
/// Modules with at least this many elements that no unit inside has taken.
WrapPolicy min_params(int64_t elements, UnitOptions options = {});
/// Every module with parameters that no unit inside has taken.
WrapPolicy always(UnitOptions options = {});

}  // namespace wrap
}  // namespace fsdp
