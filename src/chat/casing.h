// Upper and lower case of ASCII and Latin-1. Other letters that have case are refused, because it
// takes Unicode's tables to treat them as Python does.
#pragma once

#include <string>

#include "chat/machine.h"
#include "chat/text.h"

namespace fsdp::chat {

enum class Case { kUpper, kLower, kTitle, kCapital, kSwapped };

// kTitle: each word as Python's str.title has them; kCapital: the first character.
Text with_case(Machine& machine, const Text& text, Case wanted);

struct Letters {
  bool upper = false, lower = false;  // whether there is such a letter
};
Letters letters_of(Machine& machine, std::string_view text);

}  // namespace fsdp::chat
