// Tests ("x is defined"), and the table of filters.
#include "base/format.h"
#include "chat/casing.h"
#include "chat/evaluator.h"
#include "chat/operators.h"
#include "chat/print.h"

namespace fsdp::chat {
namespace {

constexpr const char* kComparisonTests[][4] = {
    {"==", "eq", "equalto", "=="}, {"!=", "ne", "ne", "!="},     {">", "gt", "greaterthan", ">"},
    {">=", "ge", "ge", ">="},      {"<", "lt", "lessthan", "<"}, {"<=", "le", "le", "<="},
    {"in", "in", "in", "in"},
};

// Tests of what kind of value it is; nullopt if `name` isn't one.
std::optional<bool> is_kind(const std::string& name, const Value& value) {
  const bool flag = value.get<bool>() != nullptr;
  const bool integer = value.get<int64_t>() != nullptr, real = value.get<double>() != nullptr;
  if (name == "defined") return !value.undefined();
  if (name == "undefined") return value.undefined();
  if (name == "none") return value.none();
  if (name == "boolean") return flag;
  if (name == "true") return flag && *value.get<bool>();
  if (name == "false") return flag && !*value.get<bool>();
  if (name == "integer") return integer;
  if (name == "float") return real;
  if (name == "number") return flag || integer || real;
  if (name == "string") return value.text() != nullptr;
  if (name == "mapping") return value.dict() != nullptr;
  if (name == "escaped") return value.markup;
  if (name == "callable") return value.get<std::shared_ptr<const Function>>() != nullptr;
  const List* list = value.list();
  const bool loop = value.get<std::shared_ptr<const Loop>>() != nullptr;
  if (name == "iterable") return value.text() || list || value.dict() || loop || value.undefined();
  // What has a length and items by number or key.
  if (name == "sequence")
    return value.text() || value.dict() ||
           (list && list->kind != List::kGenerator && list->kind != List::kView);
  return std::nullopt;
}

bool same_object(const Value& a, const Value& b) {
  if (a.data.index() != b.data.index()) return false;
  if (a.none()) return true;
  if (a.get<bool>()) return *a.get<bool>() == *b.get<bool>();
  if (a.list()) return a.list() == b.list();
  if (a.dict()) return a.dict() == b.dict();
  return false;
}

}  // namespace

bool Evaluator::tested(const std::string& name, const Value& input, const Arguments& arguments) {
  for (const auto& names : kComparisonTests)
    for (const char* one : names) {
      if (name != one) continue;
      const Values values = arguments.in_order(machine_, name, {"other"});
      return holds(machine_, names[0], input, values[0]);
    }
  if (name == "sameas") return same_object(input, arguments.in_order(machine_, name, {"other"})[0]);
  if (name == "divisibleby") {
    const Values values = arguments.in_order(machine_, name, {"num"});
    return equal(machine_, binary(machine_, "%", input, values[0]), int64_t{0});
  }
  arguments.in_order(machine_, name, {});
  if (const auto answer = is_kind(name, input)) return *answer;
  if (name == "odd" || name == "even")
    return equal(machine_, binary(machine_, "%", input, int64_t{2}), int64_t{name == "odd"});
  if (name == "lower" || name == "upper") {
    const Letters letters = letters_of(machine_, printed(machine_, input).bytes());
    return name == "lower" ? letters.lower && !letters.upper : letters.upper && !letters.lower;
  }
  machine_.refuse(formatted("the test \"{}\" isn't supported", name));
}

Value Evaluator::filtered(const std::string& name, const Value& input, const Arguments& arguments) {
  const Machine::Inside inside(machine_);
  for (auto* filter : {&text_filter, &number_filter, &list_filter, &choosing_filter})
    if (auto result = filter(*this, name, input, arguments)) return *result;
  machine_.refuse(formatted("the filter \"{}\" isn't supported", name));
}

}  // namespace fsdp::chat
