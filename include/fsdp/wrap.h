// Wrap policies: which modules become units of their own. What no policy takes falls to the next
// unit above it, at last to the root.
//
//   .wrap = wrap::modules<Block>()                     by type
//   .wrap = wrap::types({"Block"})                     by the name of the type; TorchScript too
//   .wrap = wrap::names({"layers.*"})                  by path: * within a step, ** across steps
//   .wrap = wrap::min_params(1'000'000)                by size
//   .wrap = wrap::always()                             every module that has parameters
//   .wrap = [](const ModuleView& m) { return …; }      bool, or std::optional<UnitOptions>
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

struct ModuleView {
  std::string path;                     // "layers.0"; "" is the module that is being sharded
  std::string type;                     // "Block": its class without namespaces and without "Impl"
  torch::nn::Module* module = nullptr;  // null for TorchScript
  int64_t numel = 0;                    // elements of all parameters in it
  int64_t remaining = 0;                // of those that no unit further down has taken
};

class WrapPolicy {
 public:
  using Decision = std::optional<UnitOptions>;

  WrapPolicy() = default;  // no unit but the root

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

  Decision operator()(const ModuleView& module) const {
    return decide_ ? decide_(module) : Decision();
  }
  explicit operator bool() const { return static_cast<bool>(decide_); }

 private:
  std::function<Decision(const ModuleView&)> decide_;
};

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

// Modules of these types; either the holder (Linear) or the module itself (LinearImpl) may be
// named.
template <typename... Modules>
WrapPolicy modules(UnitOptions options = {}) {
  return [options](const ModuleView& view) -> WrapPolicy::Decision {
    bool is_one = view.module &&
                  (dynamic_cast<typename detail::Contained<Modules>::type*>(view.module) || ...);
    return is_one ? WrapPolicy::Decision(options) : std::nullopt;
  };
}

WrapPolicy types(std::vector<std::string> names, UnitOptions options = {});
WrapPolicy names(std::vector<std::string> patterns, UnitOptions options = {});
WrapPolicy min_params(int64_t elements, UnitOptions options = {});
WrapPolicy always(UnitOptions options = {});

}  // namespace wrap
}  // namespace fsdp
