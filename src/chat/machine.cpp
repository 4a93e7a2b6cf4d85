#include "chat/machine.h"

#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::chat {

void Machine::refuse(const std::string& why, const std::string& hint) const {
  throw Error(formatted("{}: line {}: {}.", name_, line, why), hint);
}

void Machine::refuse(const std::string& why) const {
  refuse(why,
         "docs/data.md lists what chat templates may use; --data.chat_template names another one.");
}

void Machine::too_much(const char* what) const {
  refuse(formatted("rendering the template {}", what),
         "the conversation may be too long, or the template never ends.");
}

void Machine::too_deep() {
  ++left_.depth;  // its Inside won't be destroyed
  refuse("the template calls itself, or nests, too deeply",
         "does a macro call itself without end?");
}

void Machine::make(size_t bytes) {
  read(bytes);
  if (bytes > static_cast<size_t>(left_.bytes)) too_much("makes too much text");
  left_.bytes -= static_cast<int64_t>(bytes);
}

void Machine::output(size_t bytes) {
  if (bytes > static_cast<size_t>(left_.output)) too_much("writes too much text");
  left_.output -= static_cast<int64_t>(bytes);
}

}  // namespace fsdp::chat
