// Filters that take text, or make it.
#include <algorithm>

#include "base/format.h"
#include "chat/casing.h"
#include "chat/evaluator.h"
#include "chat/operators.h"
#include "chat/print.h"

namespace fsdp::chat {
namespace {

// Words begin behind white space, hyphens and opening brackets only.
Text titled(Machine& machine, const Text& text) {
  Text out;
  bool begins = true;
  const auto starts = code_starts(text.bytes());
  for (size_t i = 0; i + 1 < starts.size(); ++i) {
    machine.make(4);
    const Text character = text.part(starts[i], starts[i + 1]);
    out.append(with_case(machine, character, begins ? Case::kUpper : Case::kLower));
    const char32_t code = code_at(text.bytes(), starts[i]);
    begins =
        is_white(code) || code == '-' || code == '(' || code == '{' || code == '[' || code == '<';
  }
  return out;
}

Value indented(Machine& machine, const Text& text, const Arguments& arguments) {
  const Values values = arguments.in_order(machine, "indent", {"width", "first", "blank"});
  std::string indent;
  if (const Text* given_indent = values[0].text()) {
    indent = given_indent->bytes();
  } else {
    const int64_t width = integer_argument(machine, values[0], 4);
    if (width > 10'000) machine.refuse("an indentation is too wide");
    indent = std::string(static_cast<size_t>(std::max<int64_t>(width, 0)), ' ');
  }
  const bool first = given(values[1]) && truth(values[1]);
  const bool blank = given(values[2]) && truth(values[2]);
  Text ended = text;
  ended.append("\n");
  const Value lines = *call_cutting_method(machine, ended, "splitlines", {});
  Text out;
  for (size_t i = 0; i < lines.list()->items.size(); ++i) {
    const Text& line = *lines.list()->items[i].text();
    machine.make(line.size() + indent.size() + 1);
    if (i > 0) out.append("\n");
    if (i == 0 ? first : blank || line.size() > 0) out.append(indent);
    out.append(line);
  }
  return make_text(machine, std::move(out));
}

Value escaped(Machine& machine, const Value& input) {
  Value result = input;
  if (!input.markup) result = make_text(machine, html_escaped(machine, printed(machine, input)));
  result.markup = true;
  return result;
}

Value as_json(Machine& machine, const Value& input, const Arguments& arguments) {
  const Values values =
      arguments.in_order(machine, "tojson", {"ensure_ascii", "indent", "separators", "sort_keys"});
  const auto is_set = [](const Value& value) { return given(value) && !value.none(); };
  JsonStyle style;
  style.ascii = given(values[0]) && truth(values[0]);
  style.sorted = given(values[3]) && truth(values[3]);
  if (is_set(values[1])) {
    style.lines = true;
    style.between = ",";
    if (const Text* text = values[1].text()) {
      style.indent = text->bytes();
    } else {
      const int64_t width = integer_argument(machine, values[1], 0);
      if (width > 1000) machine.refuse("an indentation is too wide");
      style.indent = std::string(static_cast<size_t>(std::max<int64_t>(width, 0)), ' ');
    }
  }
  if (is_set(values[2])) {
    const Values pair = items_of(machine, values[2]);
    if (pair.size() != 2) machine.refuse("tojson needs two separators");
    style.between = text_argument(machine, pair[0], "tojson").bytes();
    style.after_key = text_argument(machine, pair[1], "tojson").bytes();
  }
  return make_text(machine, to_json(machine, input, style), input.source());
}

Value joined_items(Evaluator& evaluator, const Value& input, const Arguments& arguments) {
  Machine& machine = evaluator.machine();
  const Values values = arguments.in_order(machine, "join", {"d", "attribute"});
  const Text separator = given(values[0]) ? printed(machine, values[0]) : Text();
  Value items = input;
  if (given(values[1]) && !values[1].none()) {
    Arguments attribute;
    attribute.named.emplace_back("attribute", values[1]);
    items = evaluator.filtered("map", input, attribute);
  }
  Text out;
  bool first = true;
  for (const Value& item : items_of(machine, items)) {
    const Text text = printed(machine, item);
    machine.make(text.size() + separator.size());
    if (!first) out.append(separator);
    out.append(text);
    first = false;
  }
  return make_text(machine, std::move(out));
}

}  // namespace

std::optional<Value> text_filter(Evaluator& evaluator, const std::string& name, const Value& input,
                                 const Arguments& arguments) {
  Machine& machine = evaluator.machine();
  if (name == "tojson") return as_json(machine, input, arguments);
  if (name == "join") return joined_items(evaluator, input, arguments);
  if (name == "string") {
    arguments.in_order(machine, name, {});
    return input.text() ? input : make_text(machine, printed(machine, input));
  }
  if (name == "safe") {
    Value result = make_text(machine, printed(machine, input));
    result.markup = true;
    return result;
  }
  if (name == "e" || name == "escape") return escaped(machine, input);
  if (name == "upper" || name == "lower" || name == "capitalize")
    return call_making_method(machine, printed(machine, input), name, arguments);
  if (name == "title") {
    arguments.in_order(machine, name, {});
    return make_text(machine, titled(machine, printed(machine, input)));
  }
  if (name == "trim")
    return call_cutting_method(machine, printed(machine, input), "strip", arguments);
  if (name == "center") {
    Arguments wide = arguments;
    if (wide.values.empty() && wide.named.empty()) wide.values.push_back(int64_t{80});
    return call_making_method(machine, printed(machine, input), name, wide);
  }
  if (name == "replace") {
    const Values values = arguments.in_order(machine, name, {"old", "new", "count"});
    if (!given(values[0]) || !given(values[1])) machine.refuse("replace needs two strings");
    const int64_t most = values[2].none() ? -1 : integer_argument(machine, values[2], -1);
    return replaced(machine, printed(machine, input), printed(machine, values[0]),
                    printed(machine, values[1]), most);
  }
  if (name == "indent")
    return indented(machine, text_argument(machine, input, "indent"), arguments);
  if (name == "format") {
    if (!arguments.named.empty()) machine.refuse("format with names isn't supported");
    return format_percent(machine, printed(machine, input), arguments.values);
  }
  return std::nullopt;
}

}  // namespace fsdp::chat
