#include "train/config_toml.h"

#include <algorithm>
#include <charconv>

#include "fsdp/error.h"
#include "train/config_scalar.h"

namespace fsdp::train::toml {
namespace {

bool is_bare(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
         c == '-';
}

std::string utf8(uint32_t code) {
  std::string out;
  auto add = [&](uint32_t byte) { out += static_cast<char>(byte); };
  if (code < 0x80) {
    add(code);
  } else if (code < 0x800) {
    add(0xC0 | code >> 6), add(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    add(0xE0 | code >> 12), add(0x80 | (code >> 6 & 0x3F)), add(0x80 | (code & 0x3F));
  } else {
    add(0xF0 | code >> 18), add(0x80 | (code >> 12 & 0x3F));
    add(0x80 | (code >> 6 & 0x3F)), add(0x80 | (code & 0x3F));
  }
  return out;
}

class Reader {
 public:
  Reader(std::string_view text, const std::string& file) : text_(text), file_(file) {}

  Document read() {
    if (text_.starts_with("\xEF\xBB\xBF")) at_ = 3;
    while (!at_end()) {
      skip_blanks();
      if (peek() == '[') {
        header();
      } else if (peek() != '\n' && peek() != '#' && !at_end()) {
        key_and_value();
      }
      end_of_line();
    }
    return std::move(document_);
  }

 private:
  [[noreturn]] void fail(const std::string& what, const std::string& hint) const {
    throw Error(file_ + ":" + std::to_string(line_) + ": " + what, hint);
  }

  bool at_end() const { return at_ >= text_.size(); }
  // The next character; '\n' for both kinds of newline and for the end of the file.
  char peek(size_t ahead = 0) const {
    if (at_ + ahead >= text_.size()) return '\n';
    char c = text_[at_ + ahead];
    return c == '\r' && (at_ + ahead + 1 < text_.size()) && text_[at_ + ahead + 1] == '\n' ? '\n'
                                                                                           : c;
  }
  bool starts(std::string_view word) const { return text_.substr(at_).starts_with(word); }

  void skip_blanks() {
    while (peek() == ' ' || peek() == '\t') ++at_;
  }

  void skip_comment() {
    if (peek() != '#') return;
    for (; peek() != '\n'; ++at_) {
      if (is_control(peek())) fail("a comment contains a control character.", "remove it.");
    }
  }

  void take_newline() {
    if (at_end()) return;
    at_ += text_[at_] == '\r' ? 2 : 1;
    ++line_;
  }

  void end_of_line() {
    skip_blanks();
    skip_comment();
    if (peek() != '\n') {
      fail("unexpected \"" + rest_of_line() + "\" at the end of the line.",
           "a line has one key and one value; strings need quotes.");
    }
    take_newline();
  }

  std::string rest_of_line() const {
    size_t end = at_;
    while (end < text_.size() && text_[end] != '\n' && text_[end] != '\r') ++end;
    return std::string(text_.substr(at_, end - at_));
  }

  std::string key_part() {
    std::string part;
    if (peek() == '"' || peek() == '\'') {
      part = string();
    } else {
      while (is_bare(peek())) part += text_[at_++];
    }
    if (part.empty() || !std::all_of(part.begin(), part.end(), is_bare)) {
      fail(part.empty() ? "a key is missing before \"" + rest_of_line() + "\"."
                        : "\"" + part + "\" isn't a valid key.",
           "a line is key = value, and a key consists of letters, digits, _ and -.");
    }
    return part;
  }

  std::string dotted_key() {
    std::string key = key_part();
    skip_blanks();
    while (peek() == '.') {
      ++at_;
      skip_blanks();
      key += "." + key_part();
      skip_blanks();
    }
    return key;
  }

  void header() {
    if (starts("[[")) fail("arrays of tables aren't supported.", "write [name] instead.");
    ++at_;
    skip_blanks();
    std::string name = dotted_key();
    if (peek() != ']') fail("a ] is missing after [" + name + ".", "close the table's name.");
    ++at_;
    auto [other, is_new] = document_.tables.emplace(name, line_);
    if (!is_new) {
      fail("[" + name + "] is already in line " + std::to_string(other->second) + ".",
           "merge the two.");
    }
    table_ = name;
  }

  void key_and_value() {
    int line = line_;
    std::string key = dotted_key();
    if (peek() != '=') {
      fail("a = is missing after \"" + key + "\".", "a line is key = value, [table] or # comment.");
    }
    ++at_;
    skip_blanks();
    std::string name = table_.empty() ? key : table_ + "." + key;
    auto [other, is_new] = lines_.emplace(name, line);
    if (!is_new) {
      fail("\"" + key + "\" is already set in line " + std::to_string(other->second) + ".",
           "remove one of the two.");
    }
    document_.entries.push_back({name, value(), line});
  }

  Value value() {
    size_t begin = at_;
    Value value;
    if (peek() == '"' || peek() == '\'') {
      value.held = string();
    } else if (peek() == '[') {
      value.held = list();
    } else if (peek() == '{') {
      fail("inline tables aren't supported.", "write a [table] with its keys below it.");
    } else {
      value.held = bare_value();
    }
    value.raw = std::string(text_.substr(begin, at_ - begin));
    return value;
  }

  decltype(Value::held) bare_value() {
    size_t begin = at_;
    while (is_bare(peek()) || peek() == '+' || peek() == '.' || peek() == ':') ++at_;
    std::string_view word = text_.substr(begin, at_ - begin);
    if (word.empty()) fail("a value is missing.", "write key = value.");
    auto read = scalar(word);
    if (auto* flag = std::get_if<bool>(&read)) return *flag;
    if (auto* whole = std::get_if<int64_t>(&read)) return *whole;
    if (auto* real = std::get_if<double>(&read)) return *real;
    at_ = begin;
    fail("\"" + std::string(word) + "\" isn't a number, true or false.",
         "strings need quotes: \"" + std::string(word) + "\".");
  }

  std::vector<std::string> list() {
    int first_line = line_;
    ++at_;
    std::vector<std::string> items;
    auto skip_space = [&] {
      for (;;) {
        skip_blanks();
        skip_comment();
        if (peek() != '\n' || at_end()) return;
        take_newline();
      }
    };
    for (skip_space(); peek() != ']'; skip_space()) {
      if (at_end()) {
        fail("the list that begins in line " + std::to_string(first_line) + " isn't closed.",
             "close it with ].");
      }
      if (peek() != '"' && peek() != '\'') {
        fail("\"" + rest_of_line() + "\" isn't a quoted string.",
             "lists contain strings: [\"a\", \"b\"].");
      }
      items.push_back(string());
      skip_space();
      if (peek() == ']') break;
      if (peek() != ',') {
        fail("a comma or ] is missing in the list.",
             "separate strings with commas: [\"a\", \"b\"].");
      }
      ++at_;
    }
    ++at_;
    return items;
  }

  std::string string() {
    char quote = peek();
    if (starts(std::string(3, quote))) {
      fail("multi-line strings aren't supported.", "write one line, with \\n for each newline.");
    }
    ++at_;
    std::string out;
    while (peek() != quote) {
      char c = peek();
      if (c == '\n')
        fail("a string isn't closed in its line.",
             "close it with " + std::string(1, quote) + "; \\n stands for a newline.");
      if (is_control(c)) fail("a string contains a control character.", "write it as \\uXXXX.");
      ++at_;
      if (c == '\\' && quote == '"') {
        out += escape();
      } else {
        out += c;
      }
    }
    ++at_;
    return out;
  }

  std::string escape() {
    char c = peek();
    if (c != '\n') ++at_;
    switch (c) {
      case 'b':
        return "\b";
      case 't':
        return "\t";
      case 'n':
        return "\n";
      case 'f':
        return "\f";
      case 'r':
        return "\r";
      case '"':
        return "\"";
      case '\\':
        return "\\";
      case 'u':
      case 'U':
        break;
      default:
        fail("\\" + (c == '\n' ? "" : std::string(1, c)) + " isn't a valid escape.",
             "write a backslash as \\\\, or use '…', which has no escapes.");
    }
    size_t digits = c == 'u' ? 4 : 8;
    std::string hex = plain_digits(text_.substr(at_, digits), 16);
    uint32_t code = 0;
    if (hex.size() == digits) std::from_chars(hex.data(), hex.data() + hex.size(), code, 16);
    if (hex.size() != digits || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) {
      fail("\\" + std::string(1, c) + " isn't followed by the " + std::to_string(digits) +
               " hexadecimal digits of a character.",
           "é, for example, is \\u00E9.");
    }
    at_ += digits;
    return utf8(code);
  }

  std::string_view text_;
  const std::string& file_;
  size_t at_ = 0;
  int line_ = 1;
  std::string table_;
  std::map<std::string, int> lines_;  // of all keys so far
  Document document_;
};

}  // namespace

Document parse(std::string_view text, const std::string& file) {
  return Reader(text, file).read();
}

}  // namespace fsdp::train::toml
