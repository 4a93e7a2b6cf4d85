#include "chat/lexer.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>

#include "base/format.h"

namespace fsdp::chat {
namespace {

constexpr size_t kLongestNumber = 300;  // characters
constexpr auto kNone = std::string_view::npos;

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}
bool begins_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
         static_cast<unsigned char>(c) >= 0x80;
}

// With "\n" for every end of a line, and without the last one.
std::string with_plain_lines(std::string_view source) {
  std::string text;
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
      text += '\n';
    } else {
      text += source[i];
    }
  }
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

class Lexer {
 public:
  Lexer(Machine& machine, std::string source) : machine_(machine), source_(std::move(source)) {}

  std::vector<Token> run() {
    machine_.line = 1;
    while (at_ < source_.size()) data();
    add(Token::kEnd, "");
    return std::move(tokens_);
  }

 private:
  char peek(size_t ahead = 0) const {
    return at_ + ahead < source_.size() ? source_[at_ + ahead] : '\0';
  }
  bool sees(std::string_view text) const { return source_.compare(at_, text.size(), text) == 0; }
  void add(Token::Kind kind, std::string text, Value number = {}) {
    tokens_.push_back({kind, std::move(text), std::move(number), machine_.line});
  }
  // Goes to `end` and counts lines.
  void go(size_t end) {
    machine_.line +=
        static_cast<int>(std::count(source_.begin() + static_cast<ptrdiff_t>(at_),
                                    source_.begin() + static_cast<ptrdiff_t>(end), '\n'));
    at_ = end;
    fresh_line_ = end > 0 && source_[end - 1] == '\n';
  }
  void add_data(std::string_view text) {
    if (!text.empty()) add(Token::kData, std::string(text));
  }

  // Text up to a tag at `end`, whose sign ('-', '+' or another character) says what is left out.
  std::string_view data_before(size_t end, char sign, bool block) const {
    std::string_view text = std::string_view(source_).substr(at_, end - at_);
    if (sign == '-') return text.substr(0, trimmed_end(text));
    if (sign == '+' || !block) return text;
    const size_t newline = text.rfind('\n');
    const size_t begin = newline == kNone ? 0 : newline + 1;
    if (begin == 0 && !fresh_line_) return text;
    return skip_white(text, begin) == text.size() ? text.substr(0, begin) : text;
  }

  void data() {
    size_t tag = at_;
    do {
      tag = source_.find('{', tag);
      if (tag == kNone || tag + 1 >= source_.size()) {
        add_data(std::string_view(source_).substr(at_));
        return go(source_.size());
      }
      const char next = source_[tag + 1];
      if (next == '{' || next == '%' || next == '#') break;
      ++tag;
    } while (true);
    const char kind = source_[tag + 1], sign = tag + 2 < source_.size() ? source_[tag + 2] : '\0';
    add_data(data_before(tag, sign, kind != '{'));
    size_t inside = tag + 2 + (sign == '-' || sign == '+' ? 1 : 0);
    if (kind == '%' && raw(inside)) return;
    go(inside);
    if (kind == '#') return comment();
    add(kind == '{' ? Token::kVariableBegin : Token::kBlockBegin, "");
    tag_of(kind == '{');
  }

  // The end of a tag at `at`, with the white space that it swallows; kNone if it isn't there.
  size_t end_of_tag(size_t at, const char* mark, bool block) const {
    const char sign = at < source_.size() ? source_[at] : '\0';
    const bool signed_end = sign == '-' || (sign == '+' && block);
    const size_t begin = at + (signed_end ? 1 : 0);
    if (source_.compare(begin, 2, mark) != 0) return kNone;
    if (sign == '-') return skip_white(source_, begin + 2);
    return begin + 2 +
           (block && !signed_end && begin + 2 < source_.size() && source_[begin + 2] == '\n' ? 1
                                                                                             : 0);
  }

  void comment() {
    for (size_t at = at_; at < source_.size(); ++at) {
      const size_t end = end_of_tag(at, "#}", true);
      if (end != kNone) return go(end);
    }
    machine_.refuse("a comment has no end #}");
  }

  // `{% WORD %}` where its first character may be: the end of it, as a raw block's tags swallow it.
  size_t end_of_word(size_t at, std::string_view word, bool trims) const {
    at = skip_white(source_, at);
    if (source_.compare(at, word.size(), word) != 0) return kNone;
    at = skip_white(source_, at + word.size());
    if (!trims && at < source_.size() && source_[at] == '+') return kNone;
    const size_t end = end_of_tag(at, "%}", trims);
    if (end == kNone || trims) return end;
    return source_[at] == '-' ? end : at + 2;
  }

  // Reads a raw block, whose first tag's content begins at `inside`; false if it isn't one.
  bool raw(size_t inside) {
    const size_t begin = end_of_word(inside, "raw", false);
    if (begin == kNone) return false;
    go(begin);
    for (size_t tag = source_.find("{%", at_); tag != kNone; tag = source_.find("{%", tag + 1)) {
      const char sign = tag + 2 < source_.size() ? source_[tag + 2] : '\0';
      const size_t end =
          end_of_word(tag + 2 + (sign == '-' || sign == '+' ? 1 : 0), "endraw", true);
      if (end == kNone) continue;
      add_data(data_before(tag, sign, true));
      go(end);
      return true;
    }
    machine_.refuse("a raw block has no end {% endraw %}");
  }

  // The content of a tag, up to its end.
  void tag_of(bool variable) {
    std::string open;  // brackets to be closed
    while (at_ < source_.size()) {
      if (open.empty()) {
        const size_t end = end_of_tag(at_, variable ? "}}" : "%}", !variable);
        if (end != kNone) {
          add(variable ? Token::kVariableEnd : Token::kBlockEnd, "");
          return go(end);
        }
      }
      const size_t word = skip_white(source_, at_);
      if (word > at_) {
        go(word);
      } else if (is_digit(peek())) {
        number();
      } else if (begins_name(peek())) {
        size_t end = at_;
        while (end < source_.size() && (begins_name(source_[end]) || is_digit(source_[end]))) ++end;
        add(Token::kName, source_.substr(at_, end - at_));
        go(end);
      } else if (peek() == '\'' || peek() == '"') {
        string();
      } else {
        sign(open);
      }
    }
  }

  void sign(std::string& open) {
    for (const std::string_view two : {"//", "**", "==", "!=", ">=", "<="}) {
      if (!sees(two)) continue;
      add(Token::kOperator, std::string(two));
      return go(at_ + 2);
    }
    const char c = peek();
    if (std::string_view("+-/*%~[](){}><=.:|,;").find(c) == kNone)
      machine_.refuse(formatted("there is an unexpected character \"{}\"", c));
    if (c == '{' || c == '(' || c == '[') open += c == '{' ? '}' : c == '(' ? ')' : ']';
    if (c == '}' || c == ')' || c == ']') {
      if (open.empty() || open.back() != c)
        machine_.refuse(formatted("a \"{}\" closes nothing", c));
      open.pop_back();
    }
    add(Token::kOperator, std::string(1, c));
    go(at_ + 1);
  }

  void number() {
    size_t end = at_;
    const auto digits = [&] {
      while (end < source_.size() && (is_digit(source_[end]) || source_[end] == '_')) ++end;
    };
    digits();
    bool real = false;
    if (end + 1 < source_.size() && source_[end] == '.' && is_digit(source_[end + 1])) {
      real = true;
      ++end;
      digits();
    }
    if (end < source_.size() && (source_[end] == 'e' || source_[end] == 'E')) {
      size_t exponent = end + 1;
      if (exponent < source_.size() && (source_[exponent] == '+' || source_[exponent] == '-'))
        ++exponent;
      if (exponent < source_.size() && is_digit(source_[exponent])) {
        real = true;
        end = exponent;
        digits();
      }
    }
    if (end - at_ > kLongestNumber) machine_.refuse("a number has too many digits");
    std::string text = source_.substr(at_, end - at_);
    std::erase(text, '_');
    const char* last = text.data() + text.size();
    double value = 0;
    int64_t integer = 0;
    if (real) {
      std::from_chars(text.data(), last, value);
      add(Token::kNumber, text, value);
    } else {
      const auto result = std::from_chars(text.data(), last, integer);
      if (result.ec != std::errc{}) machine_.refuse(formatted("{} is too large a number", text));
      if (text.size() > 1 && text[0] == '0' && integer != 0)
        machine_.refuse(formatted("{} isn't a number: it begins with 0", text));
      add(Token::kNumber, text, integer);
    }
    go(end);
  }

  void string() {
    const char quote = peek();
    size_t end = at_ + 1;
    while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2 : 1;
    if (end >= source_.size()) machine_.refuse("a string has no end");
    add(Token::kString, unescaped(std::string_view(source_).substr(at_ + 1, end - at_ - 1)));
    go(end + 1);
  }

  std::string unescaped(std::string_view text) const {
    std::string out;
    for (size_t i = 0; i < text.size(); ++i) {
      if (text[i] != '\\') {
        out += text[i];
        continue;
      }
      const char c = text[++i];
      static constexpr std::string_view kLetters = "\\'\"abfnrtv";
      static constexpr std::string_view kMeanings = "\\'\"\a\b\f\n\r\t\v";
      const size_t letter = kLetters.find(c);
      if (letter != kNone) {
        out += kMeanings[letter];
      } else if (c == 'x' || c == 'u' || c == 'U') {
        const size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : 8;
        put(out, text.substr(i + 1, digits), digits, 16);
        i += digits;
      } else if (c >= '0' && c <= '7') {
        size_t digits = 1;
        while (digits < 3 && i + digits < text.size() && text[i + digits] >= '0' &&
               text[i + digits] <= '7')
          ++digits;
        put(out, text.substr(i, digits), digits, 8);
        i += digits - 1;
      } else if (c == 'N') {
        machine_.refuse("names of characters (\\N) aren't supported in strings");
      } else if (c != '\n') {  // which is left out
        out += '\\';
        out += c;
      }
    }
    return out;
  }

  void put(std::string& out, std::string_view digits, size_t expected, int base) const {
    uint32_t code = 0;
    const auto result = std::from_chars(digits.data(), digits.data() + digits.size(), code, base);
    const bool whole = digits.size() == expected && result.ptr == digits.data() + digits.size();
    if (!whole || result.ec != std::errc{} || code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
      machine_.refuse("a string has an escape that isn't a character");
    put_code(out, code);
  }

  Machine& machine_;
  std::string source_;
  size_t at_ = 0;
  bool fresh_line_ = true;  // the last tag or text ended a line
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokens_of(Machine& machine, std::string_view source) {
  return Lexer(machine, with_plain_lines(source)).run();
}

}  // namespace fsdp::chat
