// The expressions of a template, and the functions it calls.
#include <algorithm>

#include "base/format.h"
#include "chat/evaluator.h"
#include "chat/operators.h"
#include "chat/print.h"

namespace fsdp::chat {
namespace {

constexpr int64_t kLongestRange = 100'000;  // as Jinja's sandbox has it
constexpr const char* kGlobals[] = {"range", "dict", "namespace", "raise_exception",
                                    "strftime_now"};

Value undefined(const std::string& why) {
  return Undefined{std::make_shared<const std::string>(why)};
}

Value range_value(Machine& machine, const Arguments& arguments) {
  const Values values = arguments.in_order(machine, "range", {"start", "stop", "step"});
  int64_t first = integer_argument(machine, values[0], 0);
  int64_t last = integer_argument(machine, values[1], 0);
  const int64_t step = integer_argument(machine, values[2], 1);
  if (!given(values[0])) machine.refuse("range needs a number");
  if (!given(values[1])) std::swap(first, last);
  if (step == 0) machine.refuse("the step of a range is 0");
  Values items;
  while (step > 0 ? first < last : first > last) {
    machine.make(sizeof(Value));
    if (static_cast<int64_t>(items.size()) == kLongestRange)
      machine.refuse(formatted("a range has more than {} numbers", kLongestRange));
    items.push_back(first);
    if (__builtin_add_overflow(first, step, &first)) break;
  }
  return make_list(machine, std::move(items), List::kRange);
}

Value dict_value(Machine& machine, const Arguments& arguments) {
  std::vector<std::pair<Value, Value>> items;
  for (const Value& value : arguments.values) {
    if (!value.dict()) machine.refuse("dict takes a dict and named values");
    items.insert(items.end(), value.dict()->items.begin(), value.dict()->items.end());
  }
  for (const auto& [name, value] : arguments.named)
    items.emplace_back(make_text(machine, name), value);
  return make_dict(machine, std::move(items));
}

}  // namespace

Value Evaluator::evaluate(const Node& node, const ScopePtr& scope) {
  const Machine::Inside inside(machine_);
  machine_.line = node.line;
  if (node.kind >= NodeKind::kNot) return evaluate_operators(node, scope);
  return evaluate_values(node, scope);
}

Value Evaluator::evaluate_values(const Node& node, const ScopePtr& scope) {
  const auto part = [&](size_t i) {
    Value value = evaluate(*node.parts[i], scope);
    machine_.line = node.line;
    return value;
  };
  switch (node.kind) {
    case NodeKind::kConst:
      return node.value;
    case NodeKind::kName:
      return named(node.text, scope);
    case NodeKind::kHole:
      return holes_.back();
    case NodeKind::kList:
    case NodeKind::kTuple: {
      Values items;
      for (size_t i = 0; i < node.parts.size(); ++i) items.push_back(part(i));
      return make_list(machine_, std::move(items),
                       node.kind == NodeKind::kList ? List::kList : List::kTuple);
    }
    case NodeKind::kDict: {
      std::vector<std::pair<Value, Value>> items;
      for (size_t i = 0; i < node.parts.size(); i += 2) {
        Value key = part(i);
        items.emplace_back(std::move(key), part(i + 1));
      }
      return make_dict(machine_, std::move(items));
    }
    case NodeKind::kAttribute:
      return attribute_of(machine_, part(0), node.text);
    case NodeKind::kItem: {
      const Value object = part(0);
      return item_of(machine_, object, part(1));
    }
    case NodeKind::kSlice:
      return slice(node, scope);
    case NodeKind::kCall: {
      const Value callee = part(0);
      const Arguments arguments = arguments_of(node, scope);
      machine_.line = node.line;
      return call(callee, arguments);
    }
    case NodeKind::kFilter:
    case NodeKind::kTest: {
      const Value input = part(0);
      const Arguments arguments = arguments_of(node, scope);
      machine_.line = node.line;
      if (node.kind == NodeKind::kFilter) return filtered(node.text, input, arguments);
      return tested(node.text, input, arguments);
    }
    default:
      machine_.refuse("the template has an expression that isn't one");
  }
}

Value Evaluator::evaluate_operators(const Node& node, const ScopePtr& scope) {
  const auto part = [&](size_t i) {
    Value value = evaluate(*node.parts[i], scope);
    machine_.line = node.line;
    return value;
  };
  switch (node.kind) {
    case NodeKind::kNot:
      return !truth(part(0));
    case NodeKind::kAnd: {
      Value left = part(0);
      return truth(left) ? part(1) : left;
    }
    case NodeKind::kOr: {
      Value left = part(0);
      return truth(left) ? left : part(1);
    }
    case NodeKind::kNegative:
      return negative(machine_, part(0));
    case NodeKind::kPositive:
      return positive(machine_, part(0));
    case NodeKind::kBinary: {
      const Value left = part(0);
      return binary(machine_, node.text, left, part(1));
    }
    case NodeKind::kCompare:
      return compare(node, scope);
    case NodeKind::kConcat:
      return concatenate(node, scope);
    default:
      if (truth(part(1))) return part(0);
      if (node.parts[2]) return part(2);
      return undefined("an inline if was false and has no else");
  }
}

Value Evaluator::slice(const Node& node, const ScopePtr& scope) {
  Value parts[4];
  for (size_t i = 0; i < 4; ++i)
    parts[i] = node.parts[i] ? evaluate(*node.parts[i], scope) : Value(None{});
  machine_.line = node.line;
  return slice_of(machine_, parts[0], parts[1], parts[2], parts[3]);
}

Value Evaluator::compare(const Node& node, const ScopePtr& scope) {
  Value left = evaluate(*node.parts[0], scope);
  for (size_t i = 0; i < node.names.size(); ++i) {
    Value right = evaluate(*node.parts[i + 1], scope);
    machine_.line = node.line;
    if (!holds(machine_, node.names[i], left, right)) return false;
    left = std::move(right);
  }
  return true;
}

Value Evaluator::concatenate(const Node& node, const ScopePtr& scope) {
  Text all;
  for (const NodePtr& part : node.parts) {
    const Text text = printed(machine_, evaluate(*part, scope));
    machine_.make(text.size());
    all.append(text);
  }
  return make_text(machine_, std::move(all));
}

Value Evaluator::named(const std::string& name, const ScopePtr& scope) {
  if (const Value* value = scope->find(name)) return *value;
  for (const char* global : kGlobals) {
    if (name != global) continue;
    auto function = std::make_shared<Function>();
    function->name = name;
    return std::shared_ptr<const Function>(std::move(function));
  }
  return undefined(formatted("\"{}\" isn't defined", name));
}

Arguments Evaluator::arguments_of(const Node& call, const ScopePtr& scope) {
  Arguments arguments;
  for (const NodePtr& node : call.arguments) arguments.values.push_back(evaluate(*node, scope));
  if (call.spread)
    for (Value& value : items_of(machine_, evaluate(*call.spread, scope)))
      arguments.values.push_back(std::move(value));
  for (const auto& [name, node] : call.named)
    arguments.named.emplace_back(name, evaluate(*node, scope));
  if (!call.spread_named) return arguments;
  const Value rest = evaluate(*call.spread_named, scope);
  if (!rest.dict()) machine_.refuse("what follows ** isn't a dict");
  for (const auto& [key, value] : rest.dict()->items) {
    if (!key.text()) machine_.refuse("a dict after ** has a key that isn't a string");
    machine_.make(sizeof(Value));
    arguments.named.emplace_back(key.text()->bytes(), value);
  }
  return arguments;
}

Value Evaluator::call(const Value& callee, const Arguments& arguments) {
  if (const Undefined* none = callee.get<Undefined>()) machine_.refuse(*none->why);
  const auto* pointer = callee.get<std::shared_ptr<const Function>>();
  if (!pointer) machine_.refuse(formatted("a {} can't be called", type_name(callee)));
  const Function& function = **pointer;
  if (function.kind == Function::kMacro) return call_macro(function, arguments);
  if (function.kind == Function::kMethod) return call_method(machine_, function, arguments);
  return call_global(function.name, arguments);
}

Value Evaluator::macro_value(const Node& node, const ScopePtr& scope) {
  machine_.make(512);  // with the scope, which stays
  if (kept_.empty() || kept_.back() != scope) kept_.push_back(scope);
  auto function = std::make_shared<Function>();
  function->kind = Function::kMacro;
  function->name = node.text;
  function->macro = &node;
  function->scope = scope.get();
  return std::shared_ptr<const Function>(std::move(function));
}

Value Evaluator::call_macro(const Function& macro, const Arguments& arguments) {
  const Machine::Inside inside_call(machine_);
  // The scope is in kept_.
  const ScopePtr around(ScopePtr(), macro.scope);
  auto scope = std::make_shared<Scope>(around);
  bind(macro, arguments, scope);
  Text out;
  run(macro.macro->body, scope, out);
  return make_text(machine_, std::move(out));
}

void Evaluator::bind(const Function& macro, const Arguments& arguments, const ScopePtr& inside) {
  const Node& node = *macro.macro;
  auto named_ones = arguments.named;
  const auto taken = [&](const std::string& name) -> std::optional<Value> {
    const auto found = std::find_if(named_ones.begin(), named_ones.end(),
                                    [&](const auto& one) { return one.first == name; });
    if (found == named_ones.end()) return std::nullopt;
    Value value = std::move(found->second);
    named_ones.erase(found);
    return value;
  };
  for (size_t i = 0; i < node.names.size(); ++i) {
    std::optional<Value> value;
    if (i < arguments.values.size())
      value = arguments.values[i];
    else
      value = taken(node.names[i]);
    if (!value && node.parts[i]) value = evaluate(*node.parts[i], inside);
    if (!value) value = undefined(formatted("parameter \"{}\" was not provided", node.names[i]));
    inside->set(node.names[i], *value);
  }
  const std::optional<Value> caller = node.uses_caller ? taken("caller") : std::nullopt;
  if (node.uses_caller) inside->set("caller", caller.value_or(undefined("there is no caller")));
  if (node.uses_kwargs) {
    std::vector<std::pair<Value, Value>> rest;
    for (auto& [name, value] : named_ones) rest.emplace_back(make_text(machine_, name), value);
    inside->set("kwargs", make_dict(machine_, std::move(rest)));
  } else if (!named_ones.empty()) {
    machine_.refuse(
        formatted("macro \"{}\" takes no argument \"{}\"", macro.name, named_ones.front().first));
  }
  const size_t used = std::min(node.names.size(), arguments.values.size());
  Values more(arguments.values.begin() + static_cast<ptrdiff_t>(used), arguments.values.end());
  if (node.uses_varargs)
    inside->set("varargs", make_list(machine_, std::move(more), List::kTuple));
  else if (!more.empty())
    machine_.refuse(
        formatted("macro \"{}\" takes {} arguments at most", macro.name, node.names.size()));
}

Value Evaluator::new_namespace(const Arguments& arguments) {
  const Value initial = dict_value(machine_, arguments);
  auto space = std::make_shared<Namespace>();
  for (const auto& [key, value] : initial.dict()->items) {
    if (!key.text() || key.text()->bytes().starts_with("_"))
      machine_.refuse("a namespace can't have names that begin with _");
    space->items.emplace_back(key.text()->bytes(), value);
  }
  spaces_.push_back(space);
  return space;
}

Value Evaluator::call_global(const std::string& name, const Arguments& arguments) {
  if (name == "range") return range_value(machine_, arguments);
  if (name == "dict") return dict_value(machine_, arguments);
  if (name == "namespace") return new_namespace(arguments);
  if (name == "raise_exception") {
    const Values values = arguments.in_order(machine_, name, {"message"});
    machine_.refuse(formatted("the template refuses the conversation: {}",
                              printed(machine_, values[0]).bytes()),
                    "change the conversation, or the template.");
  }
  const Values values = arguments.in_order(machine_, name, {"format"});
  const std::string& format = text_argument(machine_, values[0], "strftime_now").bytes();
  char text[512];
  if (format.size() > 100) machine_.refuse("a format of strftime_now is too long");
  return make_text(machine_,
                   std::string(text, std::strftime(text, sizeof text, format.c_str(), &now_)));
}

}  // namespace fsdp::chat
