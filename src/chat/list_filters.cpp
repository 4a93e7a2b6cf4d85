// Filters that take lists: their length, order, ends and sums, and those that choose from them.
#include <algorithm>

#include "base/format.h"
#include "chat/casing.h"
#include "chat/evaluator.h"
#include "chat/operators.h"

namespace fsdp::chat {
namespace {

// What is found along "a.b.0", which may also be a number.
Value along(Machine& machine, Value value, const Value& path, const Value& otherwise) {
  const Text* text = path.text();
  if (!text) return item_of(machine, value, path);
  std::string_view rest = text->bytes();
  while (true) {
    const size_t dot = rest.find('.');
    const std::string part(rest.substr(0, dot));
    const bool number = !part.empty() && part.size() < 10 &&
                        part.find_first_not_of("0123456789") == std::string::npos;
    value =
        item_of(machine, value,
                number ? Value(static_cast<int64_t>(std::stoll(part))) : make_text(machine, part));
    if (value.undefined() && given(otherwise)) value = otherwise;
    if (dot == std::string_view::npos) return value;
    rest.remove_prefix(dot + 1);
  }
}

// What items are sorted or compared by.
struct KeyOf {
  Machine& machine;
  Value attribute;
  bool cased;

  Value operator()(const Value& item) const {
    const Value key =
        given(attribute) && !attribute.none() ? along(machine, item, attribute, Value()) : item;
    if (cased || !key.text()) return key;
    return make_text(machine, with_case(machine, *key.text(), Case::kLower));
  }
};

bool flag_of(const Value& argument) {
  return given(argument) && truth(argument);
}

// By their keys; keeps the order of equal ones.
Values in_order_of(Machine& machine, Values items, const KeyOf& key, bool reverse) {
  std::vector<std::pair<Value, size_t>> keys;
  for (const Value& item : items) keys.emplace_back(key(item), keys.size());
  machine.make(keys.size() * sizeof(keys[0]));
  std::stable_sort(keys.begin(), keys.end(), [&](const auto& a, const auto& b) {
    return reverse ? compare(machine, b.first, a.first) < 0
                   : compare(machine, a.first, b.first) < 0;
  });
  Values sorted;
  for (const auto& entry : keys) sorted.push_back(items[entry.second]);
  return sorted;
}

Value length_of(Machine& machine, const Value& input) {
  if (input.undefined()) return int64_t{0};
  if (const Text* text = input.text()) {
    machine.read(text->size());
    return static_cast<int64_t>(count_codes(text->bytes()));
  }
  if (const Dict* dict = input.dict()) return static_cast<int64_t>(dict->items.size());
  const List* list = input.list();
  if (!list || list->kind == List::kGenerator)
    machine.refuse(formatted("a {} has no length", type_name(input)));
  return static_cast<int64_t>(list->items.size());
}

Value sorted_dict(Machine& machine, const Value& input, const Arguments& arguments) {
  const Values values =
      arguments.in_order(machine, "dictsort", {"case_sensitive", "by", "reverse"});
  if (!input.dict()) machine.refuse(formatted("dictsort needs a dict, not {}", type_name(input)));
  const std::string by =
      given(values[1]) ? text_argument(machine, values[1], "dictsort").bytes() : "key";
  if (by != "key" && by != "value") machine.refuse("dictsort sorts by key or by value");
  Values items;
  for (const auto& [key, value] : input.dict()->items)
    items.push_back(make_list(machine, {key, value}, List::kTuple));
  const KeyOf key{machine, int64_t{by == "key" ? 0 : 1}, flag_of(values[0])};
  return make_list(machine, in_order_of(machine, std::move(items), key, flag_of(values[2])));
}

Value most_of(Machine& machine, const std::string& name, const Value& input,
              const Arguments& arguments) {
  const Values values = arguments.in_order(machine, name, {"case_sensitive", "attribute"});
  const KeyOf key{machine, values[1], flag_of(values[0])};
  const Values items = items_of(machine, input);
  if (items.empty())
    return Undefined{std::make_shared<const std::string>("an empty list has no " + name)};
  size_t best = 0;
  for (size_t i = 1; i < items.size(); ++i) {
    const int order = compare(machine, key(items[i]), key(items[best]));
    if (name == "min" ? order < 0 : order > 0) best = i;
  }
  return items[best];
}

Value summed(Machine& machine, const Value& input, const Arguments& arguments) {
  const Values values = arguments.in_order(machine, "sum", {"attribute", "start"});
  Value sum = given(values[1]) ? values[1] : Value(int64_t{0});
  const bool by_attribute = given(values[0]) && !values[0].none();
  for (const Value& item : items_of(machine, input))
    sum = binary(machine, "+", sum, by_attribute ? along(machine, item, values[0], Value()) : item);
  return sum;
}

Value without_repeats(Machine& machine, const Value& input, const Arguments& arguments) {
  const Values values = arguments.in_order(machine, "unique", {"case_sensitive", "attribute"});
  const KeyOf key{machine, values[1], flag_of(values[0])};
  Values seen, chosen;
  for (const Value& item : items_of(machine, input)) {
    const Value one = key(item);
    if (std::any_of(seen.begin(), seen.end(),
                    [&](const Value& other) { return equal(machine, one, other); }))
      continue;
    seen.push_back(one);
    chosen.push_back(item);
  }
  return make_list(machine, std::move(chosen), List::kGenerator);
}

Value reversed(Machine& machine, const Value& input) {
  if (const Text* text = input.text()) {
    machine.make(text->size());
    Text out;
    const auto starts = code_starts(text->bytes());
    for (size_t i = starts.size() - 1; i > 0; --i) out.append(text->part(starts[i - 1], starts[i]));
    return make_text(machine, std::move(out));
  }
  Values items = items_of(machine, input);
  std::reverse(items.begin(), items.end());
  return make_list(machine, std::move(items), List::kGenerator);
}

Value in_batches(Machine& machine, const Value& input, const Arguments& arguments) {
  const Values values = arguments.in_order(machine, "batch", {"linecount", "fill_with"});
  const int64_t size = integer_argument(machine, values[0], 0);
  if (size < 1) machine.refuse("a batch has at least one item");
  Values batches, batch;
  for (const Value& item : items_of(machine, input)) {
    if (static_cast<int64_t>(batch.size()) == size)
      batches.push_back(make_list(machine, std::exchange(batch, {})));
    batch.push_back(item);
  }
  if (given(values[1]) && !values[1].none() && !batch.empty()) {
    machine.make(static_cast<size_t>(std::min(size, int64_t{1} << 32)) * sizeof(Value));
    batch.resize(static_cast<size_t>(size), values[1]);
  }
  if (!batch.empty()) batches.push_back(make_list(machine, std::move(batch)));
  return make_list(machine, std::move(batches), List::kGenerator);
}

Value end_of(Machine& machine, const std::string& name, const Value& input) {
  if (name == "last" && input.list() && input.list()->kind == List::kGenerator)
    machine.refuse("a generator has no last item");
  const Values items = items_of(machine, input);
  if (!items.empty()) return name == "first" ? items.front() : items.back();
  return Undefined{std::make_shared<const std::string>("an empty list has no " + name + " item")};
}

// The test or filter that the arguments of map, select and such name, from argument `first` on.
struct Chosen {
  std::string name;
  Arguments arguments;
};

Chosen chosen(Machine& machine, const std::string& filter, const Arguments& arguments,
              size_t first) {
  Chosen result;
  result.name = text_argument(machine, arguments.values[first], filter.c_str()).bytes();
  result.arguments.values.assign(arguments.values.begin() + static_cast<ptrdiff_t>(first) + 1,
                                 arguments.values.end());
  result.arguments.named = arguments.named;
  return result;
}

// What is false, such as none, has no items for map, select and their kind.
Values items_if_true(Machine& machine, const Value& input) {
  return truth(input) ? items_of(machine, input) : Values();
}

Value mapped(Evaluator& evaluator, const Value& input, const Arguments& arguments) {
  Machine& machine = evaluator.machine();
  Values results;
  if (arguments.values.empty()) {
    const Values values = arguments.in_order(machine, "map", {"attribute", "default"});
    if (!given(values[0])) machine.refuse("map needs a filter or an attribute");
    for (const Value& item : items_if_true(machine, input))
      results.push_back(along(machine, item, values[0], values[1]));
  } else {
    const Chosen filter = chosen(machine, "map", arguments, 0);
    for (const Value& item : items_if_true(machine, input))
      results.push_back(evaluator.filtered(filter.name, item, filter.arguments));
  }
  return make_list(machine, std::move(results), List::kGenerator);
}

Value selected(Evaluator& evaluator, const std::string& name, const Value& input,
               const Arguments& arguments) {
  Machine& machine = evaluator.machine();
  const bool by_attribute = name.ends_with("attr"), wanted = name.starts_with("select");
  const size_t first = by_attribute ? 1 : 0;
  if (by_attribute && arguments.values.empty())
    machine.refuse(formatted("{} needs an attribute", name));
  const bool has_test = arguments.values.size() > first;
  const Chosen test = has_test ? chosen(machine, name, arguments, first) : Chosen{};
  Values results;
  for (const Value& item : items_if_true(machine, input)) {
    const Value value = by_attribute ? along(machine, item, arguments.values[0], Value()) : item;
    machine.step();
    const bool holds_here =
        has_test ? evaluator.tested(test.name, value, test.arguments) : truth(value);
    if (holds_here == wanted) results.push_back(item);
  }
  return make_list(machine, std::move(results), List::kGenerator);
}

}  // namespace

std::optional<Value> list_filter(Evaluator& evaluator, const std::string& name, const Value& input,
                                 const Arguments& arguments) {
  Machine& machine = evaluator.machine();
  if (name == "dictsort") return sorted_dict(machine, input, arguments);
  if (name == "min" || name == "max") return most_of(machine, name, input, arguments);
  if (name == "sum") return summed(machine, input, arguments);
  if (name == "unique") return without_repeats(machine, input, arguments);
  if (name == "batch") return in_batches(machine, input, arguments);
  if (name == "sort") {
    const Values values =
        arguments.in_order(machine, name, {"reverse", "case_sensitive", "attribute"});
    const KeyOf key{machine, values[2], flag_of(values[1])};
    return make_list(machine,
                     in_order_of(machine, items_of(machine, input), key, flag_of(values[0])));
  }
  static constexpr std::string_view kPlain[] = {"length", "count", "first",  "last",
                                                "list",   "items", "reverse"};
  if (std::find(std::begin(kPlain), std::end(kPlain), name) == std::end(kPlain))
    return std::nullopt;
  arguments.in_order(machine, name, {});
  if (name == "length" || name == "count") return length_of(machine, input);
  if (name == "first" || name == "last") return end_of(machine, name, input);
  if (name == "list") return make_list(machine, items_of(machine, input));
  if (name == "reverse") return reversed(machine, input);
  if (!input.dict() && !input.undefined())
    machine.refuse(formatted("items needs a dict, not {}", type_name(input)));
  Values items;
  if (input.dict())
    for (const auto& [key, value] : input.dict()->items)
      items.push_back(make_list(machine, {key, value}, List::kTuple));
  return make_list(machine, std::move(items), List::kGenerator);
}

std::optional<Value> choosing_filter(Evaluator& evaluator, const std::string& name,
                                     const Value& input, const Arguments& arguments) {
  if (name == "map") return mapped(evaluator, input, arguments);
  if (name == "select" || name == "reject" || name == "selectattr" || name == "rejectattr")
    return selected(evaluator, name, input, arguments);
  if (name == "attr") {
    Machine& machine = evaluator.machine();
    const Values values = arguments.in_order(machine, name, {"name"});
    const Text& key = text_argument(machine, values[0], "attr");
    if (!input.dict()) return attribute_of(machine, input, key.bytes());
    return Undefined{std::make_shared<const std::string>("attr finds no items of dicts")};
  }
  return std::nullopt;
}

}  // namespace fsdp::chat
