#include "fsdp/wrap.h"

#include <algorithm>

namespace fsdp::wrap {
namespace {

// `*` matches any characters within a step of the path, `**` across steps.
bool matches(std::string_view pattern, std::string_view path) {
  if (pattern.empty()) return path.empty();
  if (pattern[0] != '*')
    return !path.empty() && pattern[0] == path[0] && matches(pattern.substr(1), path.substr(1));
  bool across = pattern.starts_with("**");
  std::string_view rest = pattern.substr(across ? 2 : 1);
  for (size_t taken = 0;; ++taken) {
    if (matches(rest, path.substr(taken))) return true;
    if (taken == path.size() || (!across && path[taken] == '.')) return false;
  }
}

template <typename Test>
WrapPolicy where(Test test, UnitOptions options) {
  return [test = std::move(test), options](const ModuleView& module) -> WrapPolicy::Decision {
    return test(module) ? WrapPolicy::Decision(options) : std::nullopt;
  };
}

WrapPolicy any_of(std::vector<WrapPolicy::Wanted> wanted, UnitOptions options) {
  auto test = [wanted](const ModuleView& module) {
    return std::any_of(wanted.begin(), wanted.end(),
                       [&](const WrapPolicy::Wanted& one) { return one.matches(module); });
  };
  return where(std::move(test), options).looking_for(std::move(wanted));
}

}  // namespace

WrapPolicy types(std::vector<std::string> names, UnitOptions options) {
  std::vector<WrapPolicy::Wanted> wanted;
  for (const std::string& name : names)
    wanted.push_back({name, /*is_type=*/true, [name](const ModuleView& module) {
                        return module.type == name || module.type + "Impl" == name;
                      }});
  return any_of(std::move(wanted), options);
}

WrapPolicy names(std::vector<std::string> patterns, UnitOptions options) {
  std::vector<WrapPolicy::Wanted> wanted;
  for (const std::string& pattern : patterns)
    wanted.push_back({pattern, /*is_type=*/false, [pattern](const ModuleView& module) {
                        return matches(pattern, module.path);
                      }});
  return any_of(std::move(wanted), options);
}

WrapPolicy min_params(int64_t elements, UnitOptions options) {
  return where([elements](const ModuleView& module) { return module.remaining >= elements; },
               options);
}

WrapPolicy always(UnitOptions options) {
  return where([](const ModuleView& module) { return module.remaining > 0; }, options);
}

}  // namespace fsdp::wrap
