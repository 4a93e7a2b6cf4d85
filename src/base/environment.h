// Checked reads of environment variables: a value that doesn't parse is an Error that names the
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

// A variable and its new value; nullopt unsets it.
using Change = std::pair<std::string, std::optional<std::string>>;

// This process's environment with `changes` applied, as NAME=VALUE lines for a child process.
std::vector<std::string> changed(const std::vector<Change>& changes);

}  // namespace fsdp::environment
