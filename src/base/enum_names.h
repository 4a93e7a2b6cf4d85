// Names of an enum's values: one table per enum, which files, flags, help, documents and errors
// use.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/namespace.h"

namespace fsdp::base {

struct EnumName {
  std::string_view name;
  std::string_view help = "";  // what the value means; added to the help of options that take it
};

// The table of an enum, in the order of its values, which begin at 0. A function beside the enum
// returns it:
//
//   enum class OnNan { kSkip, kStop };
//   constexpr auto enum_table(OnNan) {
//     return std::to_array<EnumName>({{"skip"}, {"stop"}});
//   }
template <typename Enum>
inline constexpr auto kEnumNames = enum_table(Enum{});

template <typename Enum>
requires std::is_enum_v<Enum> std::string enum_name(Enum value) {
  return std::string(kEnumNames<Enum>.at(static_cast<size_t>(value)).name);
}

// nullopt if no value has that name.
template <typename Enum>
std::optional<Enum> parse_enum(std::string_view name) {
  for (size_t i = 0; i < kEnumNames<Enum>.size(); ++i)
    if (kEnumNames<Enum>[i].name == name) return static_cast<Enum>(i);
  return {};
}

template <typename Enum>
std::vector<std::string> enum_names() {
  std::vector<std::string> all;
  for (const EnumName& one : kEnumNames<Enum>) all.emplace_back(one.name);
  return all;
}

}  // namespace fsdp::base
