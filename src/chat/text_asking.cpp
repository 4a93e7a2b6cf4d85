// Methods of texts that answer a question about them: startswith, find, count, isdigit and such.
#include <algorithm>

#include "base/format.h"
#include "chat/casing.h"
#include "chat/function.h"
#include "chat/machine.h"

namespace fsdp::chat {
namespace {

// The bytes that [from, to) of the characters means, as an argument of Python's methods.
struct Range {
  size_t from, to;
  bool exists;  // false: it begins behind the end, or is negative
};

Range range_of(Machine& machine, const Text& text, const Value& from, const Value& to) {
  if (!given(from) && !given(to)) return {0, text.size(), true};
  machine.read(text.size());
  const auto starts = code_starts(text.bytes());
  const auto size = static_cast<int64_t>(starts.size() - 1);
  const auto place = [&](const Value& value, int64_t otherwise) {
    int64_t at = value.none() ? otherwise : integer_argument(machine, value, otherwise);
    return at < 0 ? std::max<int64_t>(at + size, 0) : at;
  };
  const int64_t begin = place(from, 0), end = std::min(place(to, size), size);
  if (begin > end) return {0, 0, false};
  return {starts[static_cast<size_t>(begin)], starts[static_cast<size_t>(end)], true};
}

bool affix(Machine& machine, const Text& text, const std::string& name,
           const Arguments& arguments) {
  const Values values = arguments.in_order(machine, name, {"prefix", "start", "end"});
  const Range range = range_of(machine, text, values[1], values[2]);
  const auto part = std::string_view(text.bytes()).substr(range.from, range.to - range.from);
  const auto fits = [&](const Value& value) {
    const std::string& wanted = text_argument(machine, value, name.c_str()).bytes();
    machine.read(wanted.size());
    return range.exists &&
           (name == "startswith" ? part.starts_with(wanted) : part.ends_with(wanted));
  };
  const List* several = values[0].list();
  if (several && several->kind == List::kTuple)
    return std::any_of(several->items.begin(), several->items.end(), fits);
  return fits(values[0]);
}

Value found(Machine& machine, const Text& text, const std::string& name,
            const Arguments& arguments) {
  const Values values = arguments.in_order(machine, name, {"sub", "start", "end"});
  const std::string& wanted = text_argument(machine, values[0], name.c_str()).bytes();
  const Range range = range_of(machine, text, values[1], values[2]);
  machine.read(text.size());
  const auto part = std::string_view(text.bytes()).substr(range.from, range.to - range.from);
  const size_t at = !range.exists    ? std::string_view::npos
                    : name[0] == 'r' ? part.rfind(wanted)
                                     : part.find(wanted);
  if (at != std::string_view::npos)
    return static_cast<int64_t>(
        count_codes(std::string_view(text.bytes()).substr(0, range.from + at)));
  if (name.ends_with("index")) machine.refuse(formatted("\"{}\" isn't in a text", wanted));
  return int64_t{-1};
}

Value counted(Machine& machine, const Text& text, const Arguments& arguments) {
  const Values values = arguments.in_order(machine, "count", {"sub", "start", "end"});
  const std::string& wanted = text_argument(machine, values[0], "count").bytes();
  const Range range = range_of(machine, text, values[1], values[2]);
  machine.read(text.size());
  const auto part = std::string_view(text.bytes()).substr(range.from, range.to - range.from);
  if (!range.exists) return int64_t{0};
  if (wanted.empty()) return static_cast<int64_t>(count_codes(part) + 1);
  int64_t count = 0;
  for (size_t at = part.find(wanted); at != std::string_view::npos;
       at = part.find(wanted, at + wanted.size()))
    ++count;
  return count;
}

bool is_all(Machine& machine, const Text& text, const std::string& name) {
  machine.read(text.size());
  const std::string& bytes = text.bytes();
  if (name == "isspace") return !bytes.empty() && skip_white(bytes, 0) == bytes.size();
  if (name == "isascii")
    return std::all_of(bytes.begin(), bytes.end(),
                       [](char c) { return static_cast<unsigned char>(c) < 0x80; });
  if (name == "islower" || name == "isupper") {
    const Letters letters = letters_of(machine, bytes);
    return name == "islower" ? letters.lower && !letters.upper : letters.upper && !letters.lower;
  }
  return !bytes.empty() && std::all_of(bytes.begin(), bytes.end(), [&](char c) {
    if (static_cast<unsigned char>(c) >= 0x80)
      machine.refuse(formatted("{} of \"{}\" isn't supported: only that of ASCII is", name,
                               std::string_view(bytes).substr(0, 60)));
    const bool digit = c >= '0' && c <= '9';
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    if (name == "isalpha") return letter;
    if (name == "isalnum") return letter || digit;
    return digit;
  });
}

}  // namespace

std::optional<Value> call_asking_method(Machine& machine, const Text& text, const std::string& name,
                                        const Arguments& arguments) {
  if (name == "startswith" || name == "endswith") return affix(machine, text, name, arguments);
  if (name == "find" || name == "rfind" || name == "index" || name == "rindex")
    return found(machine, text, name, arguments);
  if (name == "count") return counted(machine, text, arguments);
  if (name.starts_with("is")) {
    arguments.in_order(machine, name, {});
    return is_all(machine, text, name);
  }
  return std::nullopt;
}

}  // namespace fsdp::chat
