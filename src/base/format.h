// formatted: text with values filled in, in the syntax of {fmt}.
//
//   throw Error(formatted("{}: has {} of {} bytes.", path, size, expected), "copy it again.");
//
// Values are erased here and formatted in format.cpp: a file with forty such errors compiles in a
// third of the time that calls of {fmt} itself take. A pattern with placeholders for more or fewer
// values doesn't compile.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <variant>

#include "base/namespace.h"

namespace fsdp::base {

using FormatValue = std::variant<int64_t, uint64_t, double, std::string_view>;

template <typename T>
FormatValue format_value(const T& value) {
  static_assert(!std::same_as<T, bool>, "pass text");
  if constexpr (std::same_as<T, char>)
    return std::string_view(&value, 1);
  else if constexpr (std::signed_integral<T>)
    return static_cast<int64_t>(value);
  else if constexpr (std::unsigned_integral<T>)
    return static_cast<uint64_t>(value);
  else if constexpr (std::floating_point<T>)
    return static_cast<double>(value);
  else if constexpr (requires { value.native(); })  // a path
    return std::string_view(value.native());
  else
    return std::string_view(value);
}

// The number of values that a pattern takes; -1 if its braces don't match.
consteval int placeholders(std::string_view pattern) {
  int count = 0, open = 0;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c != '{' && c != '}') continue;
    if (open == 0 && i + 1 < pattern.size() && pattern[i + 1] == c) {
      ++i;  // an escaped brace
      continue;
    }
    count += c == '{';
    open += c == '{' ? 1 : -1;
    if (open < 0) return -1;
  }
  return open == 0 ? count : -1;
}

void another_number_of_values_than_placeholders();  // isn't defined: calling it doesn't compile

template <size_t kValues>
struct FormatPattern {
  consteval FormatPattern(const char* literal) : text(literal) {
    if (placeholders(text) != static_cast<int>(kValues))
      another_number_of_values_than_placeholders();
  }
  std::string_view text;
};

std::string format_values(std::string_view pattern, std::initializer_list<FormatValue> values);

template <typename... Values>
std::string formatted(FormatPattern<sizeof...(Values)> pattern, const Values&... values) {
  return format_values(pattern.text, {format_value(values)...});
}

}  // namespace fsdp::base
