// Values as text: as Python's str, repr and json.dumps write them.
#pragma once

#include <optional>
#include <string>

#include "chat/value.h"

namespace fsdp::chat {

// str(value), which is what a template writes for it.
Text printed(Machine& machine, const Value& value);
std::string repr(Machine& machine, const Value& value);

// With HTML's special characters as entities.
Text html_escaped(Machine& machine, const Text& text);

struct JsonStyle {
  bool ascii = false;   // escape other characters
  bool sorted = false;  // by key
  std::string indent;   // of each level, if `lines`
  bool lines = false;   // each item on a line of its own
  std::string between = ", ", after_key = ": ";
};
std::string to_json(Machine& machine, const Value& value, const JsonStyle& style);

}  // namespace fsdp::chat
