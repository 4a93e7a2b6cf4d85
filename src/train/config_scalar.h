// Single values as TOML writes them: numbers, booleans, strings. Flags read numbers in the same
// way, so that 1_000 and 1e-4 mean the same in both places.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>

namespace fsdp::train::toml {

// A number or a boolean as TOML writes them; monostate: it is neither. A whole number that does not
// fit 64 bits is a double.
std::variant<std::monostate, bool, int64_t, double> scalar(std::string_view text);

std::string quoted(std::string_view text);  // as a basic string, escaped where it must be
std::string written(double value);          // the shortest text that reads back as the same double

// Digits of `base` without the underscores that may stand between two of them; empty: it is wrong.
std::string plain_digits(std::string_view text, int base);
bool is_control(char c);  // a character that strings and comments may not hold; a tab is none

}  // namespace fsdp::train::toml
