// Turns tokens into a tree. What the language has and we don't is refused by name, with its line.
#pragma once

#include <string_view>

#include "chat/ast.h"
#include "chat/machine.h"

namespace fsdp::chat {

struct Parsed {
  Nodes body;
  bool has_generation = false;  // a {% generation %} tag
};

Parsed parse(Machine& machine, std::string_view source);

}  // namespace fsdp::chat
