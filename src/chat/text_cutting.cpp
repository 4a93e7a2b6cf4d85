// Methods of texts that give parts of them: strip, split, partition and such.
#include <algorithm>

#include "chat/function.h"
#include "chat/machine.h"

namespace fsdp::chat {
namespace {

struct Cut {
  size_t from, to;
};

Value values_of(Machine& machine, const Text& text, const std::vector<Cut>& cuts,
                List::Kind kind = List::kList) {
  Values parts;
  for (const Cut& cut : cuts) parts.push_back(make_text(machine, text.part(cut.from, cut.to)));
  return make_list(machine, std::move(parts), kind);
}

bool is_one_of(std::string_view bytes, size_t begin, size_t end, const Text* characters) {
  if (!characters) return is_white(code_at(bytes, begin));
  return characters->bytes().find(bytes.substr(begin, end - begin)) != std::string::npos;
}

// `characters`: those that are taken off, or null for white space.
Value stripped(Machine& machine, const Text& text, const Text* characters, bool left, bool right) {
  machine.read(text.size());
  const std::string& bytes = text.bytes();
  size_t from = 0, to = bytes.size();
  while (left && from < to) {
    size_t end = from + 1;
    while (end < to && continues_code(bytes[end])) ++end;
    if (!is_one_of(bytes, from, end, characters)) break;
    from = end;
  }
  while (right && from < to) {
    size_t begin = to - 1;
    while (begin > from && continues_code(bytes[begin])) --begin;
    if (!is_one_of(bytes, begin, to, characters)) break;
    to = begin;
  }
  return make_text(machine, text.part(from, to));
}

// At white space; no part is empty.
std::vector<Cut> words_of(std::string_view text, int64_t most, bool from_right) {
  std::vector<Cut> words;
  for (size_t at = skip_white(text, 0); at < text.size();) {
    size_t end = at;
    while (end < text.size() && (continues_code(text[end]) || !is_white(code_at(text, end)))) ++end;
    words.push_back({at, end});
    at = skip_white(text, end);
  }
  const auto count = static_cast<int64_t>(words.size());
  if (most < 0 || count <= most) return words;
  if (from_right) {
    words.erase(words.begin() + 1, words.begin() + (count - most));
    const size_t end =
        words.size() > 1 ? trimmed_end(text.substr(0, words[1].from)) : trimmed_end(text);
    words[0] = {0, end};
  } else {
    words.resize(static_cast<size_t>(most + 1));
    words.back().to = text.size();
  }
  return words;
}

std::vector<Cut> parts_at(const std::string& text, const std::string& separator, int64_t most,
                          bool from_right) {
  std::vector<Cut> parts;
  size_t from = 0, to = text.size();
  while (most != 0) {
    const size_t found =
        from_right ? (to < separator.size() ? std::string::npos
                                            : text.rfind(separator, to - separator.size()))
                   : text.find(separator, from);
    if (found == std::string::npos) break;
    if (from_right) {
      parts.push_back({found + separator.size(), to});
      to = found;
    } else {
      parts.push_back({from, found});
      from = found + separator.size();
    }
    --most;
  }
  parts.push_back({from, to});
  if (from_right) std::reverse(parts.begin(), parts.end());
  return parts;
}

Value split(Machine& machine, const Text& text, const std::string& name,
            const Arguments& arguments) {
  const Values given_values = arguments.in_order(machine, name, {"sep", "maxsplit"});
  const int64_t most = integer_argument(machine, given_values[1], -1);
  machine.read(text.size());
  if (!given(given_values[0]) || given_values[0].none())
    return values_of(machine, text, words_of(text.bytes(), most, name == "rsplit"));
  const Text& separator = text_argument(machine, given_values[0], name.c_str());
  if (separator.size() == 0) machine.refuse("a separator is empty");
  return values_of(machine, text,
                   parts_at(text.bytes(), separator.bytes(), most, name == "rsplit"));
}

// The characters that end a line for Python, by their first byte.
size_t line_end_at(std::string_view text, size_t at) {
  const char c = text[at];
  if (c == '\r') return at + 1 < text.size() && text[at + 1] == '\n' ? 2 : 1;
  if (c == '\n' || c == '\v' || c == '\f' || (c >= 0x1c && c <= 0x1e)) return 1;
  if (text.substr(at, 2) == "\xc2\x85") return 2;
  if (text.substr(at, 3) == "\xe2\x80\xa8" || text.substr(at, 3) == "\xe2\x80\xa9") return 3;
  return 0;
}

Value lines_of(Machine& machine, const Text& text, bool keep_ends) {
  machine.read(text.size());
  std::vector<Cut> lines;
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t length = line_end_at(text.bytes(), at);
    if (length > 0) {
      lines.push_back({begin, keep_ends ? at + length : at});
      begin = at + length;
    }
    at += std::max<size_t>(length, 1);
  }
  if (begin < text.size()) lines.push_back({begin, text.size()});
  return values_of(machine, text, lines);
}

Value partition(Machine& machine, const Text& text, const Text& separator, bool last) {
  machine.read(text.size());
  if (separator.size() == 0) machine.refuse("a separator is empty");
  const size_t found =
      last ? text.bytes().rfind(separator.bytes()) : text.bytes().find(separator.bytes());
  if (found == std::string::npos)
    return values_of(machine, text,
                     last ? std::vector<Cut>{{0, 0}, {0, 0}, {0, text.size()}}
                          : std::vector<Cut>{{0, text.size()}, {0, 0}, {0, 0}},
                     List::kTuple);
  const size_t end = found + separator.size();
  return values_of(machine, text, {{0, found}, {found, end}, {end, text.size()}}, List::kTuple);
}

}  // namespace

std::optional<Value> call_cutting_method(Machine& machine, const Text& text,
                                         const std::string& name, const Arguments& arguments) {
  if (name == "strip" || name == "lstrip" || name == "rstrip") {
    const Values values = arguments.in_order(machine, name, {"chars"});
    const bool any = given(values[0]) && !values[0].none();
    const Text* characters = any ? &text_argument(machine, values[0], name.c_str()) : nullptr;
    return stripped(machine, text, characters, name != "rstrip", name != "lstrip");
  }
  if (name == "split" || name == "rsplit") return split(machine, text, name, arguments);
  if (name == "splitlines") {
    const Values values = arguments.in_order(machine, name, {"keepends"});
    return lines_of(machine, text, given(values[0]) && truth(values[0]));
  }
  if (name == "partition" || name == "rpartition") {
    const Values values = arguments.in_order(machine, name, {"sep"});
    return partition(machine, text, text_argument(machine, values[0], name.c_str()),
                     name == "rpartition");
  }
  if (name == "removeprefix" || name == "removesuffix") {
    const Values values = arguments.in_order(machine, name, {"part"});
    const std::string& part = text_argument(machine, values[0], name.c_str()).bytes();
    const std::string& bytes = text.bytes();
    const bool prefix = name == "removeprefix" && bytes.starts_with(part);
    const bool suffix = name == "removesuffix" && bytes.ends_with(part);
    return make_text(machine, text.part(prefix ? part.size() : 0,
                                        suffix ? bytes.size() - part.size() : bytes.size()));
  }
  return std::nullopt;
}

}  // namespace fsdp::chat
