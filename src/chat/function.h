// What a template can call: its macros, methods of values, and a few functions.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "chat/value.h"

namespace fsdp::chat {

struct Node;
class Scope;

struct Function {
  enum Kind { kMacro, kMethod, kGlobal } kind = kGlobal;
  std::string name;
  Value self = {};              // of a method
  const Node* macro = nullptr;  // of a macro or call block, and where it was defined
  Scope* scope = nullptr;
};

// The arguments of a call.
struct Arguments {
  Values values;
  std::vector<std::pair<std::string, Value>> named;

  // The arguments in the order of `names`; Undefined without a reason where there is none. Refuses
  // others.
  Values in_order(Machine& machine, std::string_view function,
                  std::initializer_list<const char*> names) const;
};

// Whether in_order() found an argument.
inline bool given(const Value& argument) {
  const Undefined* missing = argument.get<Undefined>();
  return !missing || missing->why;
}

// Arguments of the types that Python wants.
int64_t integer_argument(Machine& machine, const Value& argument, int64_t otherwise);
const Text& text_argument(Machine& machine, const Value& argument, const char* function);

// Value.name; Undefined if there is none.
Value attribute_of(Machine& machine, const Value& object, const std::string& name);
// Value[key]; Undefined if there is none.
Value item_of(Machine& machine, const Value& object, const Value& key);
// Value[from:to:step].
Value slice_of(Machine& machine, const Value& object, const Value& from, const Value& to,
               const Value& step);

// Calls a method of a text, list or dict.
Value call_method(Machine& machine, const Function& method, const Arguments& arguments);

// Methods of texts by kind: nullopt if `name` isn't one.
std::optional<Value> call_cutting_method(Machine& machine, const Text& text,
                                         const std::string& name, const Arguments& arguments);
std::optional<Value> call_asking_method(Machine& machine, const Text& text, const std::string& name,
                                        const Arguments& arguments);
std::optional<Value> call_making_method(Machine& machine, const Text& text, const std::string& name,
                                        const Arguments& arguments);
bool is_text_method(std::string_view name);
// `text` with `with` in place of `old`, at most `most` times; -1: everywhere.
Value replaced(Machine& machine, const Text& text, const Text& old, const Text& with, int64_t most);

}  // namespace fsdp::chat
