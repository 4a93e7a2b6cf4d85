#include "chat/print.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/format.h"
#include "chat/function.h"
#include "chat/machine.h"

namespace fsdp::chat {
namespace {

// The shortest digits that give the number back, laid out as Python lays them out.
std::string float_text(double number) {
  if (std::isnan(number)) return "nan";
  if (std::isinf(number)) return number < 0 ? "-inf" : "inf";
  char buffer[64];
  const auto result =
      std::to_chars(buffer, buffer + sizeof buffer, number, std::chars_format::scientific);
  std::string text(buffer, result.ptr);  // -d.ddde+XX
  const size_t e = text.find('e');
  const int exponent = std::stoi(text.substr(e + 1));
  std::string digits = text.substr(0, e), sign;
  if (digits[0] == '-') {
    sign = "-";
    digits.erase(0, 1);
  }
  std::erase(digits, '.');
  const int count = static_cast<int>(digits.size());
  if (exponent < -4 || exponent >= 16) {
    if (count > 1) digits.insert(1, ".");
    return formatted("{}{}e{}{:02d}", sign, digits, exponent < 0 ? "-" : "+", std::abs(exponent));
  }
  if (exponent < 0)
    return sign + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  if (count <= exponent + 1)
    return sign + digits + std::string(static_cast<size_t>(exponent + 1 - count), '0') + ".0";
  return sign + digits.insert(static_cast<size_t>(exponent + 1), ".");
}

// Whether Python's repr writes a character as it is. Unassigned ones count as printable.
bool is_printable(char32_t code) {
  if (code < 0x7f) return code >= 0x20;
  const bool space = is_white(code) || (code >= 0x7f && code < 0xa0);
  const bool format = code == 0xad || (code >= 0x600 && code <= 0x605) || code == 0x61c ||
                      code == 0x6dd || code == 0x70f || code == 0x180e ||
                      (code >= 0x200b && code <= 0x200f) || (code >= 0x202a && code <= 0x202e) ||
                      (code >= 0x2060 && code <= 0x206f) || code == 0xfeff ||
                      (code >= 0xfff0 && code <= 0xfffb) || code >= 0xe0000;
  const bool no_character = (code >= 0xe000 && code <= 0xf8ff) || (code & 0xfffe) == 0xfffe;
  return !space && !format && !no_character;
}

std::string quoted(std::string_view text) {
  const bool doubled =
      text.find('\'') != std::string_view::npos && text.find('"') == std::string_view::npos;
  const char quote = doubled ? '"' : '\'';
  std::string out(1, quote);
  for (size_t i = 0; i < text.size(); ++i) {
    if (continues_code(text[i])) continue;
    const char32_t code = code_at(text, i);
    if (code == '\\' || code == static_cast<char32_t>(quote)) {
      out += '\\';
      put_code(out, code);
    } else if (code == '\n' || code == '\r' || code == '\t') {
      out += code == '\n' ? "\\n" : code == '\r' ? "\\r" : "\\t";
    } else if (is_printable(code)) {
      put_code(out, code);
    } else if (code < 0x100) {
      out += formatted("\\x{:02x}", static_cast<uint32_t>(code));
    } else if (code < 0x10000) {
      out += formatted("\\u{:04x}", static_cast<uint32_t>(code));
    } else {
      out += formatted("\\U{:08x}", static_cast<uint32_t>(code));
    }
  }
  return out + quote;
}

std::string scalar(Machine& machine, const Value& value) {
  if (value.undefined()) return "";
  if (value.none()) return "None";
  if (const bool* flag = value.get<bool>()) return *flag ? "True" : "False";
  if (const int64_t* integer = value.get<int64_t>()) return std::to_string(*integer);
  if (const double* real = value.get<double>()) return float_text(*real);
  machine.refuse(formatted("a {} can't be written as text", type_name(value)));
}

std::string repr_of_items(Machine& machine, const List& list) {
  std::string out;
  for (const Value& item : list.items) {
    if (!out.empty()) out += ", ";
    out += repr(machine, item);
  }
  if (list.kind == List::kList) return "[" + out + "]";
  if (list.items.size() == 1) out += ",";
  return "(" + out + ")";
}

void escape(std::string& out, std::string_view text, bool ascii) {
  out += '"';
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    static constexpr std::string_view kSpecial = "\"\\\n\r\t\f\b", kLetters = "\"\\nrtfb";
    const size_t special = kSpecial.find(text[i]);
    if (special != std::string_view::npos) {
      out += '\\';
      out += kLetters[special];
    } else if (byte < 0x20 || (ascii && byte == 0x7f)) {
      out += formatted("\\u{:04x}", static_cast<uint32_t>(byte));
    } else if (byte < 0x80 || !ascii) {
      out += text[i];
    } else if (!continues_code(text[i])) {
      const char32_t code = code_at(text, i);
      if (code >= 0x10000) {
        out += formatted("\\u{:04x}", static_cast<uint32_t>(0xd800 + ((code - 0x10000) >> 10)));
        out += formatted("\\u{:04x}", static_cast<uint32_t>(0xdc00 + ((code - 0x10000) & 0x3ff)));
      } else {
        out += formatted("\\u{:04x}", static_cast<uint32_t>(code));
      }
    }
  }
  out += '"';
}

struct JsonWriter {
  Machine& machine;
  const JsonStyle& style;
  std::string out = {};

  void write(const Value& value, int level) {
    machine.step();
    if (const Text* text = value.text()) {
      machine.make(text->size());
      return escape(out, text->bytes(), style.ascii);
    }
    if (const List* list = value.list();
        list && (list->kind == List::kList || list->kind == List::kTuple))
      return items(*list, level);
    if (const Dict* dict = value.dict()) return entries(*dict, level);
    const bool* flag = value.get<bool>();
    const double* real = value.get<double>();
    if (value.none())
      out += "null";
    else if (flag)
      out += *flag ? "true" : "false";
    else if (real && !std::isfinite(*real))
      out += std::isnan(*real) ? "NaN" : *real < 0 ? "-Infinity" : "Infinity";
    else if (real || value.get<int64_t>())
      out += scalar(machine, value);
    else
      machine.refuse(formatted("a value of type {} can't be written as JSON", type_name(value)));
  }

  void line(int level) {
    if (!style.lines) return;
    machine.make(style.indent.size() * static_cast<size_t>(level) + 1);
    out += '\n';
    for (int i = 0; i < level; ++i) out += style.indent;
  }

  void items(const List& list, int level) {
    out += '[';
    bool first = true;
    for (const Value& item : list.items) {
      if (!std::exchange(first, false)) out += style.between;
      line(level + 1);
      write(item, level + 1);
    }
    if (!first) line(level);
    out += ']';
  }

  void entries(const Dict& dict, int level) {
    std::vector<const std::pair<Value, Value>*> order;
    for (const auto& entry : dict.items) order.push_back(&entry);
    if (style.sorted)
      std::stable_sort(order.begin(), order.end(), [&](const auto* a, const auto* b) {
        return compare(machine, a->first, b->first) < 0;
      });
    out += '{';
    bool first = true;
    for (const auto* entry : order) {
      if (!std::exchange(first, false)) out += style.between;
      line(level + 1);
      key(entry->first);
      out += style.after_key;
      write(entry->second, level + 1);
    }
    if (!first) line(level);
    out += '}';
  }

  void key(const Value& value) {
    if (const Text* text = value.text()) return escape(out, text->bytes(), style.ascii);
    if (value.list() || value.undefined()) machine.refuse("a key of JSON must be a string");
    out += '"';
    write(value, 0);
    out += '"';
  }
};

}  // namespace

Text printed(Machine& machine, const Value& value) {
  if (const Text* text = value.text()) return *text;
  Text text(value.list() || value.dict() ? repr(machine, value) : scalar(machine, value),
            value.source());
  machine.make(text.size());
  return text;
}

Text html_escaped(Machine& machine, const Text& text) {
  Text out;
  for (size_t at = 0; at < text.size();) {
    const size_t special = std::min(text.bytes().find_first_of("&<>'\"", at), text.size());
    machine.make(special - at + 8);
    out.append(text.part(at, special));
    if (special == text.size()) break;
    const char c = text.bytes()[special];
    out.append(c == '&'    ? "&amp;"
               : c == '<'  ? "&lt;"
               : c == '>'  ? "&gt;"
               : c == '\'' ? "&#39;"
                           : "&#34;",
               text.part(special, special + 1).origin());
    at = special + 1;
  }
  return out;
}

std::string repr(Machine& machine, const Value& value) {
  machine.step();
  if (const Text* text = value.text()) {
    machine.make(text->size());
    return quoted(text->bytes());
  }
  if (const List* list = value.list()) {
    if (list->kind != List::kList && list->kind != List::kTuple)
      machine.refuse(formatted("a {} can't be written as text", type_name(value)));
    return repr_of_items(machine, *list);
  }
  if (const Dict* dict = value.dict()) {
    std::string out;
    for (const auto& [key, item] : dict->items) {
      if (!out.empty()) out += ", ";
      out += repr(machine, key) + ": " + repr(machine, item);
    }
    return "{" + out + "}";
  }
  return value.undefined() ? "Undefined" : scalar(machine, value);
}

std::string to_json(Machine& machine, const Value& value, const JsonStyle& style) {
  JsonWriter writer{machine, style};
  writer.write(value, 0);
  machine.make(writer.out.size());
  return std::move(writer.out);
}

}  // namespace fsdp::chat
