#include "base/format.h"

#include <fmt/args.h>
#include <fmt/format.h>

namespace fsdp::base {

std::string format_values(std::string_view pattern, std::initializer_list<FormatValue> values) {
  fmt::dynamic_format_arg_store<fmt::format_context> erased;
  for (const auto& value : values) std::visit([&](auto held) { erased.push_back(held); }, value);
  return fmt::vformat(pattern, erased);
}

}  // namespace fsdp::base
