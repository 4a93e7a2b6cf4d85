// Methods of texts that make new ones: replace, join, upper, format and such.
#include <algorithm>

#include "base/format.h"
#include "chat/casing.h"
#include "chat/function.h"
#include "chat/machine.h"
#include "chat/print.h"

namespace fsdp::chat {
namespace {

constexpr int64_t kWidestText = 1 << 20;  // characters that a text is filled up to

Value joined(Machine& machine, const Text& separator, const Value& values) {
  Text out;
  bool first = true;
  for (const Value& value : items_of(machine, values)) {
    const Text* text = value.text();
    if (!text) machine.refuse(formatted("join needs strings, not {}", type_name(value)));
    machine.make(text->size() + separator.size());
    if (!first) out.append(separator);
    out.append(*text);
    first = false;
  }
  return make_text(machine, std::move(out));
}

// With white space, or zeros, to a number of characters.
Value filled(Machine& machine, const Text& text, const std::string& name,
             const Arguments& arguments) {
  const Values values = arguments.in_order(machine, name, {"width", "fillchar"});
  const int64_t width = integer_argument(machine, values[0], 0);
  if (width > kWidestText) machine.refuse("a text is filled up too much");
  const std::string fill = name == "zfill" ? "0"
                           : given(values[1])
                               ? text_argument(machine, values[1], name.c_str()).bytes()
                               : " ";
  if (count_codes(fill) != 1) machine.refuse("a fill character isn't one character");
  const auto missing =
      std::max<int64_t>(width - static_cast<int64_t>(count_codes(text.bytes())), 0);
  const int64_t left = name == "ljust"    ? 0
                       : name == "center" ? missing / 2 + (missing & width & 1)
                                          : missing;
  machine.make(static_cast<size_t>(missing) * fill.size());
  Text out;
  const bool sign =
      name == "zfill" && text.size() > 0 && (text.bytes()[0] == '-' || text.bytes()[0] == '+');
  if (sign) out.append(text.part(0, 1));
  for (int64_t i = 0; i < left; ++i) out.append(fill);
  out.append(text.part(sign ? 1 : 0, text.size()));
  for (int64_t i = left; i < missing; ++i) out.append(fill);
  return make_text(machine, std::move(out));
}

// str.format with {}, {0} and {name}.
Value filled_in(Machine& machine, const Text& text, const Arguments& arguments) {
  const std::string& bytes = text.bytes();
  Text out;
  size_t next = 0;
  for (size_t at = 0; at < bytes.size();) {
    const size_t brace = std::min(bytes.find_first_of("{}", at), bytes.size());
    out.append(text.part(at, brace));
    if (brace == bytes.size()) break;
    if (bytes.compare(brace + 1, 1, bytes, brace, 1) == 0) {
      out.append(text.part(brace, brace + 1));
      at = brace + 2;
      continue;
    }
    const size_t end = bytes.find('}', brace);
    if (bytes[brace] == '}' || end == std::string::npos)
      machine.refuse("the braces of a format don't match");
    const std::string field = bytes.substr(brace + 1, end - brace - 1);
    if (field.find_first_of("{!:.[") != std::string::npos)
      machine.refuse(formatted("the format field {{{}}} isn't supported", field));
    const Value* value = nullptr;
    const bool number = field.find_first_not_of("0123456789") == std::string::npos;
    if (number && field.size() < 9) {
      const size_t index = field.empty() ? next++ : std::stoul(field);
      if (index < arguments.values.size()) value = &arguments.values[index];
    }
    for (const auto& [name, argument] : arguments.named)
      if (name == field) value = &argument;
    if (!value) machine.refuse(formatted("there is no value for the format field {{{}}}", field));
    const Text part = printed(machine, *value);
    machine.make(part.size());
    out.append(part);
    at = end + 1;
  }
  return make_text(machine, std::move(out));
}

std::optional<Case> case_of(const std::string& name) {
  if (name == "upper") return Case::kUpper;
  if (name == "lower" || name == "casefold") return Case::kLower;
  if (name == "title") return Case::kTitle;
  if (name == "capitalize") return Case::kCapital;
  if (name == "swapcase") return Case::kSwapped;
  return std::nullopt;
}

}  // namespace

Value replaced(Machine& machine, const Text& text, const Text& old, const Text& with,
               int64_t most) {
  machine.read(text.size());
  Text out;
  size_t at = 0;
  const auto put = [&](const Text& part) {
    machine.make(part.size() + 1);
    out.append(part);
  };
  if (old.size() == 0) {  // between all characters
    const auto starts = code_starts(text.bytes());
    for (size_t i = 0; i < starts.size() && most != 0; ++i, --most) {
      put(with);
      at = i + 1 < starts.size() ? starts[i + 1] : text.size();
      if (i + 1 < starts.size()) put(text.part(starts[i], at));
    }
  } else {
    for (; most != 0; --most) {
      const size_t found = text.bytes().find(old.bytes(), at);
      if (found == std::string::npos) break;
      put(text.part(at, found));
      const bool plain = with.origin().part == Part::kTemplate;
      put(plain ? Text(with.bytes(), text.part(found, found + old.size()).origin()) : with);
      at = found + old.size();
    }
  }
  put(text.part(at, text.size()));
  return make_text(machine, std::move(out));
}

bool is_text_method(std::string_view name) {
  static constexpr std::string_view kNames[] = {
      "strip",     "lstrip",     "rstrip",       "split",        "rsplit",     "splitlines",
      "partition", "rpartition", "removeprefix", "removesuffix", "startswith", "endswith",
      "find",      "rfind",      "index",        "rindex",       "count",      "isspace",
      "isascii",   "islower",    "isupper",      "isalpha",      "isalnum",    "isdigit",
      "isdecimal", "isnumeric",  "replace",      "join",         "upper",      "lower",
      "casefold",  "title",      "capitalize",   "swapcase",     "center",     "ljust",
      "rjust",     "zfill",      "format"};
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

std::optional<Value> call_making_method(Machine& machine, const Text& text, const std::string& name,
                                        const Arguments& arguments) {
  if (const auto wanted = case_of(name)) {
    arguments.in_order(machine, name, {});
    return make_text(machine, with_case(machine, text, *wanted));
  }
  if (name == "replace") {
    const Values values = arguments.in_order(machine, name, {"old", "new", "count"});
    return replaced(machine, text, text_argument(machine, values[0], "replace"),
                    text_argument(machine, values[1], "replace"),
                    integer_argument(machine, values[2], -1));
  }
  if (name == "join") {
    const Values values = arguments.in_order(machine, name, {"values"});
    if (!given(values[0])) machine.refuse("join needs the strings to join");
    return joined(machine, text, values[0]);
  }
  if (name == "center" || name == "ljust" || name == "rjust" || name == "zfill")
    return filled(machine, text, name, arguments);
  if (name == "format") return filled_in(machine, text, arguments);
  return std::nullopt;
}

}  // namespace fsdp::chat
