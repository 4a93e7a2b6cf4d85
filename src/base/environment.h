// Environment variables, read with a check: a value that does not parse is an Error that names the
// variable, never a silent default.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::environment {

std::optional<std::string> text(const char* name);  // unset or empty: nullopt
std::optional<int64_t> integer(const char* name);
bool flag(const char* name, bool otherwise);  // 1/true/yes/on, 0/false/no/off

// The first of `names` that is set.
std::optional<int64_t> first_integer(const std::vector<const char*>& names);

}  // namespace fsdp::environment
