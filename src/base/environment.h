// Environment variables, read with a check: a value that does not parse is an Error that names the
// variable, never a silent default.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::environment {

std::optional<std::string> text(const char* name);  // unset or empty: nullopt
std::optional<int64_t> integer(const char* name);
bool flag(const char* name, bool otherwise);  // 1/true/yes/on, 0/false/no/off

// A variable and its new value; without one it is taken away.
using Change = std::pair<std::string, std::optional<std::string>>;

// This process's environment as NAME=VALUE lines, with the changes made: for a process to start.
std::vector<std::string> changed(const std::vector<Change>& changes);

}  // namespace fsdp::environment
