#include "base/environment.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <set>

#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::environment {

std::optional<std::string> text(const char* name) {
  const char* value = std::getenv(name);
  if (!value || !*value) return std::nullopt;
  return value;
}

std::optional<int64_t> integer(const char* name) {
  auto value = text(name);
  if (!value) return std::nullopt;
  int64_t number = 0;
  auto [end, problem] = std::from_chars(value->data(), value->data() + value->size(), number);
  if (problem != std::errc() || end != value->data() + value->size()) {
    throw Error(formatted("{}=\"{}\" is not a whole number.", name, *value),
                formatted("set {} to a number, or unset it.", name));
  }
  return number;
}

bool flag(const char* name, bool otherwise) {
  auto value = text(name);
  if (!value) return otherwise;
  std::transform(value->begin(), value->end(), value->begin(),
                 [](unsigned char c) { return std::tolower(c); });
  for (const char* yes : {"1", "true", "yes", "on"})
    if (*value == yes) return true;
  for (const char* no : {"0", "false", "no", "off"})
    if (*value == no) return false;
  throw Error(formatted("{}=\"{}\" is neither true nor false.", name, *value),
              formatted("set {} to 1 or 0, or unset it.", name));
}

std::vector<std::string> changed(const std::vector<Change>& changes) {
  std::set<std::string> names;
  std::vector<std::string> lines;
  for (const auto& [name, value] : changes) {
    names.insert(name);
    if (value) lines.push_back(name + "=" + *value);
  }
  for (char** entry = environ; *entry; ++entry)
    if (!names.count(std::string(*entry, std::strcspn(*entry, "=")))) lines.push_back(*entry);
  return lines;
}

}  // namespace fsdp::environment
