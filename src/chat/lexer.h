// Cuts a template into tokens. White space around tags goes as transformers has it: trim_blocks and
// lstrip_blocks are on.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "chat/machine.h"
#include "chat/value.h"

namespace fsdp::chat {

struct Token {
  enum Kind {
    kData,
    kName,
    kString,
    kNumber,
    kOperator,
    kVariableBegin,
    kVariableEnd,
    kBlockBegin,
    kBlockEnd,
    kEnd
  } kind;
  std::string text;  // a name, an operator, or the content of data and strings
  Value number;
  int line;
};

// The last token is kEnd. Errors are those of machine.refuse.
std::vector<Token> tokens_of(Machine& machine, std::string_view source);

}  // namespace fsdp::chat
