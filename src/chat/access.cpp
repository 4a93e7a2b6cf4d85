// Attributes, items and slices of values, and methods of lists and dicts.
#include <algorithm>

#include "base/format.h"
#include "chat/function.h"
#include "chat/machine.h"
#include "chat/print.h"

namespace fsdp::chat {
namespace {

constexpr std::string_view kDictMethods[] = {"keys", "values", "items", "get", "copy"};
constexpr std::string_view kListMethods[] = {"index", "count", "copy"};
// Of Python's lists and dicts; templates may not change values.
constexpr std::string_view kChanging[] = {"append",  "clear",      "extend",  "insert",
                                          "pop",     "remove",     "reverse", "sort",
                                          "popitem", "setdefault", "update"};

template <size_t kCount>
bool has(const std::string_view (&names)[kCount], std::string_view name) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

Value nothing(const std::string& why) {
  return Undefined{std::make_shared<const std::string>(why)};
}

Value method(const Value& self, const std::string& name) {
  auto function = std::make_shared<Function>();
  function->kind = Function::kMethod;
  function->name = name;
  function->self = self;
  return std::shared_ptr<const Function>(std::move(function));
}

// Methods and what else Python finds by getattr, without dict entries.
std::optional<Value> own_attribute(Machine& machine, const Value& object, const std::string& name) {
  if (object.text() && is_text_method(name)) return method(object, name);
  if (object.dict() && has(kDictMethods, name)) return method(object, name);
  const List* list = object.list();
  const bool sequence = list && (list->kind == List::kList || list->kind == List::kTuple);
  if (sequence && has(kListMethods, name)) return method(object, name);
  if ((object.dict() || (list && list->kind == List::kList)) && has(kChanging, name))
    return nothing(
        formatted("\"{}\" would change a {}, which a template may not", name, type_name(object)));
  if (const auto* space = object.get<std::shared_ptr<Namespace>>()) {
    machine.step(static_cast<int64_t>((*space)->items.size() / 4));
    for (const auto& [key, value] : (*space)->items)
      if (key == name) return value;
  }
  return std::nullopt;
}

Value loop_attribute(Machine& machine, const Loop& loop, const std::string& name) {
  if (!loop.items) machine.refuse("a loop that has ended has no state");
  const auto at = static_cast<int64_t>(loop.at), size = static_cast<int64_t>(loop.items->size());
  if (name == "index") return at + 1;
  if (name == "index0") return at;
  if (name == "first") return at == 0;
  if (name == "last") return at == size - 1;
  if (name == "length") return size;
  if (name == "revindex") return size - at;
  if (name == "revindex0") return size - at - 1;
  if (name == "depth") return int64_t{loop.depth};
  if (name == "depth0") return int64_t{loop.depth - 1};
  if (name == "previtem")
    return at > 0 ? (*loop.items)[loop.at - 1] : nothing("there is no previous item");
  if (name == "nextitem")
    return at + 1 < size ? (*loop.items)[loop.at + 1] : nothing("there is no next item");
  machine.refuse(formatted("\"loop.{}\" isn't supported here", name));
}

Value lacking(const Value& object, const std::string& name) {
  return nothing(formatted("a {} has no \"{}\"", type_name(object), name));
}

Value call_dict_method(Machine& machine, const Value& self, const std::string& name,
                       const Arguments& arguments) {
  const Dict& dict = *self.dict();
  if (name == "get") {
    const Values values = arguments.in_order(machine, name, {"key", "default"});
    if (!given(values[0])) machine.refuse("get needs a key");
    const Value* there = find(machine, dict, values[0]);
    return there ? *there : given(values[1]) ? values[1] : Value(None{});
  }
  arguments.in_order(machine, name, {});
  if (name == "copy") return self;
  Values items;
  for (const auto& [key, value] : dict.items)
    items.push_back(name == "keys"     ? key
                    : name == "values" ? value
                                       : make_list(machine, {key, value}, List::kTuple));
  return make_list(machine, std::move(items), List::kView);
}

Value call_list_method(Machine& machine, const Value& self, const std::string& name,
                       const Arguments& arguments) {
  const List& list = *self.list();
  if (name == "copy") return self;
  const Values values = arguments.in_order(machine, name, {"value"});
  if (!given(values[0])) machine.refuse(formatted("{} needs a value", name));
  int64_t count = 0;
  for (size_t i = 0; i < list.items.size(); ++i) {
    if (!equal(machine, list.items[i], values[0])) continue;
    if (name == "index") return static_cast<int64_t>(i);
    ++count;
  }
  if (name == "index") machine.refuse("a value isn't in a list");
  return count;
}

struct Slice {
  int64_t first = 0, step = 1, count = 0;
};

// Which of `size` items [from:to:step] means.
Slice slice_of_size(Machine& machine, int64_t size, const Value& from, const Value& to,
                    const Value& by) {
  const auto part = [&](const Value& value, int64_t otherwise) {
    return value.none() || !given(value) ? otherwise : integer_argument(machine, value, otherwise);
  };
  const int64_t step = part(by, 1);
  if (step == 0) machine.refuse("the step of a slice is 0");
  const int64_t low = step > 0 ? 0 : -1, high = step > 0 ? size : size - 1;
  const auto place = [&](int64_t at) {
    if (at < 0) at += size;
    return std::clamp(at, low, std::max(low, high));
  };
  const bool has_from = given(from) && !from.none(), has_to = given(to) && !to.none();
  const int64_t first = has_from ? place(part(from, 0)) : step > 0 ? low : high;
  const int64_t last = has_to ? place(part(to, 0)) : step > 0 ? high : low;
  Slice slice{first, step, 0};
  if (step > 0 && last > first) slice.count = (last - first - 1) / step + 1;
  if (step < 0 && last < first)
    slice.count = (first - last - 1) / -(step + (step == INT64_MIN)) + 1;
  return slice;
}

}  // namespace

Values Arguments::in_order(Machine& machine, std::string_view function,
                           std::initializer_list<const char*> names) const {
  if (values.size() > names.size())
    machine.refuse(
        formatted("{} takes {} arguments, not {}", function, names.size(), values.size()));
  Values ordered = values;
  ordered.resize(names.size());
  for (const auto& [name, value] : named) {
    const auto place = std::find(names.begin(), names.end(), name);
    if (place == names.end())
      machine.refuse(formatted("{} takes no argument \"{}\"", function, name));
    const auto index = static_cast<size_t>(place - names.begin());
    if (index < values.size())
      machine.refuse(formatted("{} got two values for \"{}\"", function, name));
    ordered[index] = value;
  }
  return ordered;
}

int64_t integer_argument(Machine& machine, const Value& argument, int64_t otherwise) {
  if (!given(argument)) return otherwise;
  int64_t storage;
  const int64_t* integer = integer_of(argument, storage);
  if (!integer) machine.refuse(formatted("an integer is needed, not {}", type_name(argument)));
  return *integer;
}

const Text& text_argument(Machine& machine, const Value& argument, const char* function) {
  if (const Text* text = argument.text()) return *text;
  if (const Undefined* none = argument.get<Undefined>(); none && none->why)
    machine.refuse(*none->why);
  machine.refuse(formatted("{} needs a string, not {}", function,
                           given(argument) ? type_name(argument) : "nothing"));
}

Value attribute_of(Machine& machine, const Value& object, const std::string& name) {
  if (const Undefined* none = object.get<Undefined>()) machine.refuse(*none->why);
  if (name.starts_with("_") && !object.dict())
    return nothing(formatted("access to \"{}\" isn't safe", name));
  if (const auto* loop = object.get<std::shared_ptr<const Loop>>())
    return loop_attribute(machine, **loop, name);
  if (auto own = own_attribute(machine, object, name)) return *own;
  if (const Dict* dict = object.dict()) {
    machine.step(static_cast<int64_t>(dict->items.size() / 4));
    if (const Value* value = dict->find(name)) return *value;
  }
  return lacking(object, name);
}

Value item_of(Machine& machine, const Value& object, const Value& key) {
  if (const Undefined* none = object.get<Undefined>()) machine.refuse(*none->why);
  if (const Dict* dict = object.dict()) {
    if (!key.list() && !key.dict())
      if (const Value* value = find(machine, *dict, key)) return *value;
  } else if (int64_t storage; const int64_t* index = integer_of(key, storage)) {
    const Text* text = object.text();
    const List* list = object.list();
    const bool indexed = list && list->kind != List::kView && list->kind != List::kGenerator;
    if (text) machine.read(text->size());
    const auto size = static_cast<int64_t>(text      ? count_codes(text->bytes())
                                           : indexed ? list->items.size()
                                                     : 0);
    const int64_t at = *index < 0 ? *index + size : *index;
    if (at < 0 || at >= size)
      return nothing(formatted("a {} has no element {}", type_name(object), *index));
    if (indexed) return list->items[static_cast<size_t>(at)];
    const auto starts = code_starts(text->bytes());
    return make_text(
        machine, text->part(starts[static_cast<size_t>(at)], starts[static_cast<size_t>(at) + 1]));
  }
  if (const Text* name = key.text()) {
    if (!name->bytes().starts_with("_"))
      if (auto own = own_attribute(machine, object, name->bytes())) return *own;
    if (const auto* loop = object.get<std::shared_ptr<const Loop>>())
      return loop_attribute(machine, **loop, name->bytes());
    return lacking(object, name->bytes());
  }
  return nothing(formatted("a {} has no such element", type_name(object)));
}

Value slice_of(Machine& machine, const Value& object, const Value& from, const Value& to,
               const Value& step) {
  if (const Undefined* none = object.get<Undefined>()) machine.refuse(*none->why);
  if (const Text* text = object.text()) {
    machine.make(text->size() / 2 + 1);
    const auto starts = code_starts(text->bytes());
    const Slice slice =
        slice_of_size(machine, static_cast<int64_t>(starts.size() - 1), from, to, step);
    const auto first = static_cast<size_t>(slice.first);
    if (slice.count > 0 && slice.step == 1)
      return make_text(machine,
                       text->part(starts[first], starts[first + static_cast<size_t>(slice.count)]));
    Text out;
    for (int64_t i = 0; i < slice.count; ++i) {
      const auto at = static_cast<size_t>(slice.first + i * slice.step);
      machine.step();
      out.append(text->part(starts[at], starts[at + 1]));
    }
    return make_text(machine, std::move(out));
  }
  const List* list = object.list();
  if (!list || list->kind == List::kView || list->kind == List::kGenerator)
    return nothing(formatted("a {} has no slices", type_name(object)));
  const Slice slice =
      slice_of_size(machine, static_cast<int64_t>(list->items.size()), from, to, step);
  machine.make(static_cast<size_t>(slice.count) * sizeof(Value));
  Values items;
  for (int64_t i = 0; i < slice.count; ++i)
    items.push_back(list->items[static_cast<size_t>(slice.first + i * slice.step)]);
  return make_list(machine, std::move(items), list->kind);
}

Value call_method(Machine& machine, const Function& method, const Arguments& arguments) {
  if (method.self.dict()) return call_dict_method(machine, method.self, method.name, arguments);
  if (method.self.list()) return call_list_method(machine, method.self, method.name, arguments);
  const Text& text = *method.self.text();
  if (auto result = call_cutting_method(machine, text, method.name, arguments)) return *result;
  if (auto result = call_asking_method(machine, text, method.name, arguments)) return *result;
  if (auto result = call_making_method(machine, text, method.name, arguments)) return *result;
  machine.refuse(formatted("the method \"{}\" isn't supported", method.name));
}

}  // namespace fsdp::chat
