#include "chat/value.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/format.h"
#include "chat/function.h"
#include "chat/machine.h"

namespace fsdp::chat {
namespace {

[[noreturn]] void refuse_comparison(Machine& machine, const Value& a, const Value& b) {
  machine.refuse(formatted("{} and {} can't be compared", type_name(a), type_name(b)));
}

// The number of a value that Python counts as one.
bool number_of(const Value& value, double& number) {
  int64_t storage;
  if (const int64_t* integer = integer_of(value, storage))
    number = static_cast<double>(*integer);
  else if (const double* real = value.get<double>())
    number = *real;
  else
    return false;
  return true;
}

template <class T>
int order(const T& a, const T& b) {
  return a < b ? -1 : b < a ? 1 : 0;
}

bool ordered_kind(const List& list) {
  return list.kind == List::kList || list.kind == List::kTuple;
}

bool equal_items(Machine& machine, const List& a, const List& b) {
  if (a.kind != b.kind || !ordered_kind(a)) return false;
  if (a.items.size() != b.items.size()) return false;
  for (size_t i = 0; i < a.items.size(); ++i)
    if (!equal(machine, a.items[i], b.items[i])) return false;
  return true;
}

bool equal_items(Machine& machine, const Dict& a, const Dict& b) {
  if (a.items.size() != b.items.size()) return false;
  for (const auto& [key, value] : a.items) {
    const Value* other = find(machine, b, key);
    if (!other || !equal(machine, value, *other)) return false;
  }
  return true;
}

void check_depth(Machine& machine, int depth) {
  if (depth > kDeepestValue) machine.refuse("lists and dicts are nested too deeply");
}

bool may_be_key(const Value& value) {
  const List* list = value.list();
  if (list && list->kind == List::kTuple)
    return std::all_of(list->items.begin(), list->items.end(), may_be_key);
  return !list && !value.dict() && !value.get<std::shared_ptr<Namespace>>();
}

}  // namespace

const Text* Value::text() const {
  const auto* pointer = get<std::shared_ptr<const Text>>();
  return pointer ? pointer->get() : nullptr;
}
const List* Value::list() const {
  const auto* pointer = get<std::shared_ptr<List>>();
  return pointer ? pointer->get() : nullptr;
}
const Dict* Value::dict() const {
  const auto* pointer = get<std::shared_ptr<Dict>>();
  return pointer ? pointer->get() : nullptr;
}

Origin Value::source() const {
  if (const Text* string = text()) return string->origin();
  Origin strongest = origin;
  if (const List* values = list()) {
    for (const Value& item : values->items) {
      strongest = stronger(strongest, item.source());
      if (strongest.part == Part::kContent) break;
    }
  }
  if (const Dict* entries = dict()) {
    for (const auto& [key, value] : entries->items) {
      strongest = stronger(strongest, stronger(key.source(), value.source()));
      if (strongest.part == Part::kContent) break;
    }
  }
  return strongest;
}

int Value::depth() const {
  if (const List* values = list()) return values->depth;
  if (const Dict* entries = dict()) return entries->depth;
  return 0;
}

const Value* Dict::find(std::string_view key) const {
  for (const auto& [name, value] : items)
    if (const Text* text = name.text(); text && text->bytes() == key) return &value;
  return nullptr;
}

const int64_t* integer_of(const Value& value, int64_t& storage) {
  if (const bool* flag = value.get<bool>()) return storage = *flag, &storage;
  return value.get<int64_t>();
}

const char* type_name(const Value& value) {
  static constexpr const char* kNames[] = {"Undefined", "NoneType", "bool",       "int",
                                           "float",     "str",      "list",       "dict",
                                           "Namespace", "function", "LoopContext"};
  if (const List* list = value.list()) {
    static constexpr const char* kLists[] = {"list", "tuple", "dict view", "range", "generator"};
    return kLists[list->kind];
  }
  return kNames[value.data.index()];
}

bool truth(const Value& value) {
  if (value.undefined() || value.none()) return false;
  if (const bool* flag = value.get<bool>()) return *flag;
  if (const int64_t* integer = value.get<int64_t>()) return *integer != 0;
  if (const double* real = value.get<double>()) return *real != 0;
  if (const Text* text = value.text()) return text->size() != 0;
  if (const List* list = value.list())
    return list->kind == List::kGenerator || !list->items.empty();
  if (const Dict* dict = value.dict()) return !dict->items.empty();
  if (const auto* loop = value.get<std::shared_ptr<const Loop>>()) return !(*loop)->items->empty();
  return true;
}

bool equal(Machine& machine, const Value& a, const Value& b) {
  machine.step();
  int64_t left, right;
  const int64_t *i = integer_of(a, left), *j = integer_of(b, right);
  if (i && j) return *i == *j;
  double x, y;
  if (number_of(a, x) && number_of(b, y)) return x == y;
  if (a.data.index() != b.data.index()) return false;
  if (const Text* text = a.text()) {
    machine.read(text->size());
    return text->bytes() == b.text()->bytes();
  }
  if (a.undefined() || a.none()) return true;
  if (const List* list = a.list()) return equal_items(machine, *list, *b.list());
  if (const Dict* dict = a.dict()) return equal_items(machine, *dict, *b.dict());
  if (const auto* names = a.get<std::shared_ptr<Namespace>>())
    return *names == *b.get<std::shared_ptr<Namespace>>();
  return false;
}

int compare(Machine& machine, const Value& a, const Value& b) {
  machine.step();
  int64_t left, right;
  const int64_t *i = integer_of(a, left), *j = integer_of(b, right);
  if (i && j) return order(*i, *j);
  double x, y;
  if (number_of(a, x) && number_of(b, y)) {
    if (std::isnan(x) || std::isnan(y)) machine.refuse("NaN can't be compared");
    return order(x, y);
  }
  const Text *s = a.text(), *t = b.text();
  if (s && t) {
    machine.read(std::min(s->size(), t->size()));
    return order(s->bytes(), t->bytes());
  }
  const List *p = a.list(), *q = b.list();
  if (!p || !q || p->kind != q->kind || !ordered_kind(*p)) refuse_comparison(machine, a, b);
  for (size_t n = 0; n < std::min(p->items.size(), q->items.size()); ++n)
    if (!equal(machine, p->items[n], q->items[n]))
      return compare(machine, p->items[n], q->items[n]);
  return order(p->items.size(), q->items.size());
}

const Value* find(Machine& machine, const Dict& dict, const Value& key) {
  machine.step(static_cast<int64_t>(dict.items.size() / 4) + 1);
  if (const Text* text = key.text()) return dict.find(text->bytes());
  if (!may_be_key(key)) machine.refuse(formatted("a {} can't be a dict's key", type_name(key)));
  for (const auto& [name, value] : dict.items)
    if (equal(machine, name, key)) return &value;
  return nullptr;
}

bool contains(Machine& machine, const Value& items, const Value& item) {
  if (const Text* text = items.text()) {
    const Text* part = item.text();
    if (!part) machine.refuse(formatted("'in <string>' needs a string, not {}", type_name(item)));
    machine.read(text->size());
    return text->bytes().find(part->bytes()) != std::string::npos;
  }
  if (const Dict* dict = items.dict()) return find(machine, *dict, item) != nullptr;
  if (items.undefined()) return false;
  for (const Value& one : items_of(machine, items))
    if (equal(machine, one, item)) return true;
  return false;
}

Value make_text(Machine& machine, Text text) {
  machine.make(text.size() + sizeof(Text) + text.runs().size() * sizeof(Run));
  return std::make_shared<const Text>(std::move(text));
}

Value make_text(Machine& machine, std::string bytes, Origin origin) {
  return make_text(machine, Text(std::move(bytes), origin));
}

Value make_list(Machine& machine, Values items, List::Kind kind) {
  machine.make(items.size() * sizeof(Value) + sizeof(List));
  int depth = 0;
  for (const Value& item : items) depth = std::max(depth, item.depth());
  check_depth(machine, depth + 1);
  auto list = std::make_shared<List>();
  list->kind = kind;
  list->items = std::move(items);
  list->depth = depth + 1;
  return list;
}

Value make_dict(Machine& machine, std::vector<std::pair<Value, Value>> items) {
  machine.make(items.size() * 2 * sizeof(Value) + sizeof(Dict));
  auto dict = std::make_shared<Dict>();
  int depth = 0;
  for (auto& [key, value] : items) {
    depth = std::max({depth, key.depth(), value.depth()});
    if (const Value* there = find(machine, *dict, key))
      *const_cast<Value*>(there) = std::move(value);  // of this dict
    else
      dict->items.emplace_back(std::move(key), std::move(value));
  }
  check_depth(machine, depth + 1);
  dict->depth = depth + 1;
  return dict;
}

Values items_of(Machine& machine, const Value& value) {
  Values items;
  if (const Text* text = value.text()) {
    machine.make(text->size() * sizeof(Value));
    const auto starts = code_starts(text->bytes());
    for (size_t i = 0; i + 1 < starts.size(); ++i)
      items.push_back(make_text(machine, text->part(starts[i], starts[i + 1])));
  } else if (const auto* list = value.get<std::shared_ptr<List>>()) {
    machine.make((*list)->items.size() * sizeof(Value));
    if ((*list)->kind == List::kGenerator)
      std::swap(items, (*list)->items);
    else
      items = (*list)->items;
  } else if (const Dict* dict = value.dict()) {
    machine.make(dict->items.size() * sizeof(Value));
    for (const auto& entry : dict->items) items.push_back(entry.first);
  } else if (!value.undefined()) {
    machine.refuse(formatted("a {} has no items to go through", type_name(value)));
  }
  return items;
}

Value from_json(Machine& machine, const nlohmann::ordered_json& json, Origin origin) {
  const Machine::Inside inside(machine);
  Value value = None{};
  if (json.is_string()) return make_text(machine, json.get_ref<const std::string&>(), origin);
  if (json.is_array()) {
    Values items;
    for (const auto& item : json) items.push_back(from_json(machine, item, origin));
    return make_list(machine, std::move(items));
  }
  if (json.is_object()) {
    std::vector<std::pair<Value, Value>> items;
    for (const auto& [key, item] : json.items())
      items.emplace_back(make_text(machine, key, origin), from_json(machine, item, origin));
    return make_dict(machine, std::move(items));
  }
  if (json.is_boolean()) value = json.get<bool>();
  if (json.is_number_float()) value = json.get<double>();
  if (json.is_number_integer()) {
    if (json.is_number_unsigned() && json.get<uint64_t>() > INT64_MAX)
      machine.refuse(formatted("{} is too large a number", json.get<uint64_t>()));
    value = json.get<int64_t>();
  }
  value.origin = origin;
  return value;
}

Value from_messages(Machine& machine, const nlohmann::ordered_json& messages) {
  Values items;
  if (!messages.is_array()) machine.refuse("the messages aren't a list");
  for (const auto& message : messages) {
    if (!message.is_object()) machine.refuse("a message isn't an object");
    const auto number = static_cast<int32_t>(items.size());
    std::vector<std::pair<Value, Value>> fields;
    for (const auto& [key, field] : message.items()) {
      const Part part = key == "role" ? Part::kRole : Part::kContent;
      fields.emplace_back(make_text(machine, key),
                          from_json(machine, field, {.part = part, .message = number}));
    }
    items.push_back(make_dict(machine, std::move(fields)));
    (*items.back().get<std::shared_ptr<Dict>>())->message = number;
  }
  return make_list(machine, std::move(items));
}

}  // namespace fsdp::chat
