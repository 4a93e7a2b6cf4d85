// Value: what an expression of a template gives, as Python sees it. Values are immutable, except
// for namespaces.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "chat/text.h"

namespace fsdp::chat {

struct List;
struct Dict;
struct Namespace;
struct Function;
struct Loop;
class Machine;

struct None {};
struct Undefined {
  std::shared_ptr<const std::string> why;  // a sentence without its full stop
};

struct Value {
  std::variant<Undefined, None, bool, int64_t, double, std::shared_ptr<const Text>,
               std::shared_ptr<List>, std::shared_ptr<Dict>, std::shared_ptr<Namespace>,
               std::shared_ptr<const Function>, std::shared_ptr<const Loop>>
      data;
  Origin origin;        // of numbers and truth values; a text has its own
  bool markup = false;  // went through the filter `safe` or `escape`

  Value() = default;
  template <class T>
  Value(T value) : data(std::move(value)) {}  // NOLINT: every kind of value is one

  template <class T>
  const T* get() const {
    return std::get_if<T>(&data);
  }
  const Text* text() const;
  const List* list() const;
  const Dict* dict() const;
  bool undefined() const { return get<Undefined>() != nullptr; }
  bool none() const { return get<None>() != nullptr; }
  // Of what is computed from it.
  Origin source() const;
  int depth() const;  // of lists and dicts in each other
};

using Values = std::vector<Value>;

struct List {
  // kView: a dict's keys, values or items. kGenerator: its items can be read once.
  enum Kind { kList, kTuple, kView, kRange, kGenerator } kind = kList;
  Values items;
  int depth = 1;
};

struct Dict {
  std::vector<std::pair<Value, Value>> items;  // in the order in which they were added
  int32_t message = -1;                        // its number, if it is one of the messages
  int depth = 1;
  const Value* find(std::string_view key) const;
};

struct Namespace {
  std::vector<std::pair<std::string, Value>> items;
};

// The state of a loop that `loop` shows.
struct Loop {
  const Values* items = nullptr;  // while the loop runs
  size_t at = 0;
  int depth = 1;
};

// True, false, or an integer; nullptr otherwise.
const int64_t* integer_of(const Value& value, int64_t& storage);

const char* type_name(const Value& value);  // Python's

bool truth(const Value& value);

// These throw what Machine::refuse throws if Python raises a TypeError.
bool equal(Machine& machine, const Value& a, const Value& b);
int compare(Machine& machine, const Value& a, const Value& b);  // < 0, 0, > 0
bool contains(Machine& machine, const Value& items, const Value& item);
const Value* find(Machine& machine, const Dict& dict, const Value& key);

Value make_text(Machine& machine, Text text);
Value make_text(Machine& machine, std::string bytes, Origin origin = {});
Value make_list(Machine& machine, Values items, List::Kind kind = List::kList);
Value make_dict(Machine& machine, std::vector<std::pair<Value, Value>> items);  // later keys win

// The items that a loop over the value sees. Uses up a generator.
Values items_of(Machine& machine, const Value& value);

// A value of JSON. `origin` is where its texts come from.
Value from_json(Machine& machine, const nlohmann::ordered_json& json, Origin origin = {});
// The list of messages: each field knows its message and whether it is the role.
Value from_messages(Machine& machine, const nlohmann::ordered_json& messages);

}  // namespace fsdp::chat
