// TOML scalars: numbers, booleans, strings. Flags use the same syntax for numbers, so that 1_000
// and 1e-4 mean the same in both places.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>

namespace fsdp::train::toml {

// Parses a TOML number or boolean; monostate if it is neither. An integer that doesn't fit in 64
// bits is a double.
std::variant<std::monostate, bool, int64_t, double> scalar(std::string_view text);

std::string quoted(std::string_view text);  // as a basic string, with escapes
std::string written(double value);          // the shortest text that parses to the same double

// Digits in `base` without underscores between them; empty if `text` isn't valid.
std::string plain_digits(std::string_view text, int base);
bool is_control(char c);  // a character that strings and comments can't contain; not a tab

}  // namespace fsdp::train::toml
