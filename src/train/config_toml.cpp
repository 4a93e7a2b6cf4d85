#include "train/config_toml.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>

// The reader of toml++: strict about numbers, and without asserts, which some invalid files would
// trigger. In a namespace of our own, because a program may bring another version.
#define TOML_HEADER_ONLY 1
#define TOML_ENABLE_FORMATTERS 0
#define TOML_ENABLE_UNRELEASED_FEATURES 0
#define TOML_FLOAT_CHARCONV 1
#define TOML_MAX_NESTED_VALUES 8
#define TOML_ASSERT(condition) static_assert(true)
#define toml fsdp_toml
#include <toml++/toml.h>
#undef toml

#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::train {
namespace {

constexpr size_t kLargestFile = 16 << 20;  // bytes
constexpr int kDeepestKey = 32;            // parts
constexpr std::string_view kAroundWords = " \t\r\n=,[]{}#";

bool is_control(char c) {
  auto byte = static_cast<unsigned char>(c);
  return (byte < 0x20 && c != '\t') || byte == 0x7f;
}

// --- places in the text ---

class TomlSource {
 public:
  TomlSource(std::string_view text, const std::string& file) : text_(text), file_(file) {
    if (text.size() > kLargestFile)
      throw Error(formatted("{} has {} bytes, too many for a config.", file, text.size()),
                  "configs are TOML files of at most 16 MiB.");
    if (text_.starts_with("\xEF\xBB\xBF")) text_.remove_prefix(3);
    for (size_t at = 0; at < text_.size(); ++at)
      if (text_[at] == '\n') lines_.push_back(at + 1);
  }

  std::string_view text() const { return text_; }
  const std::string& file() const { return file_; }

  [[noreturn]] void fail(size_t line, const std::string& what, const std::string& hint) const {
    throw Error(formatted("{}:{}: {}", file_, line, what), hint);
  }

  size_t line_at(size_t offset) const {  // from 1
    return std::upper_bound(lines_.begin(), lines_.end(), offset) - lines_.begin();
  }
  size_t line_begin(size_t line) const {
    return line > lines_.size() ? text_.size() : lines_[line - 1];
  }
  size_t line_end(size_t line) const {  // before \n or \r\n
    size_t end = line < lines_.size() ? lines_[line] - 1 : text_.size();
    return end > line_begin(line) && text_[end - 1] == '\r' ? end - 1 : end;
  }

  size_t offset(fsdp_toml::source_position place) const {  // whose columns are characters, from 1
    size_t at = line_begin(place.line);
    for (size_t column = 1; column < place.column && at < text_.size(); ++column)
      for (++at; at < text_.size() && (text_[at] & 0xC0) == 0x80;) ++at;
    return at;
  }
  std::string part(const fsdp_toml::source_region& region) const {
    return between(offset(region.begin), offset(region.end));
  }
  std::string between(size_t begin, size_t end) const {
    return begin < end ? std::string(text_.substr(begin, end - begin)) : "";  // end may be npos
  }

 private:
  std::string_view text_;
  const std::string& file_;
  std::vector<size_t> lines_ = {0};  // where they begin
};

// Calls visit(offset, character) for what is neither in a string nor in a comment. Strings end in
// their line.
template <typename Visit>
void scan(std::string_view text, Visit visit) {
  for (size_t at = 0; at < text.size(); ++at) {
    const char c = text[at];
    visit(at, c);
    if (c != '"' && c != '\'' && c != '#') continue;
    for (++at; at < text.size() && text[at] != '\n' && (c == '#' || text[at] != c); ++at)
      if (c == '"' && text[at] == '\\' && text.substr(at + 1, 1) != "\n") ++at;
    if (at < text.size() && text[at] == '\n') visit(at, '\n');
  }
}

// Whether a quote stands behind a letter or a number, and something that isn't ASCII behind it.
bool is_quote_in_word(std::string_view text, size_t quote) {
  if (quote == 0 ||
      std::string_view(" \t\r\n=[]{},\"'").find(text[quote - 1]) != std::string_view::npos)
    return false;
  const std::string_view rest = text.substr(quote, text.find('\n', quote) - quote);
  return std::any_of(rest.begin(), rest.end(), [](char c) { return c & 0x80; });
}

// Refuses what toml++ 3.3 can't handle: keys of very many parts, whose tables it frees
// recursively, and non-ASCII letters outside strings, in strings of several lines, or behind a
// number (0x1"é").
void check_letters(const TomlSource& source) {
  const std::string_view text = source.text();
  int parts = 1;
  scan(text, [&](size_t at, char c) {
    auto fail = [&](const std::string& what, const std::string& hint) {
      source.fail(source.line_at(at), what, hint);
    };
    if (std::string_view("=[]{},\n").find(c) != std::string_view::npos) parts = 1;
    if (c == '.' && ++parts > kDeepestKey)
      fail(formatted("a key has more than {} parts.", kDeepestKey),
           "a key is section.name; strings need quotes.");
    if ((c == '"' || c == '\'') && text.substr(at, 3) == std::string(3, c))
      fail("multi-line strings aren't supported.", "write one line, with \\n for each newline.");
    if ((c == '"' || c == '\'') && is_quote_in_word(text, at))
      fail("a quote is in the middle of a word.", "a string begins and ends with a quote.");
    if (c & 0x80) {
      const std::string word = source.between(at, text.find_first_of(kAroundWords, at));
      fail(formatted("\"{}\" isn't ASCII, but isn't in a string.", word),
           formatted("strings need quotes: \"{}\".", word));
    }
  });
}

// Where the list that isn't closed at the end of `text` begins; npos if there is none.
size_t open_list(std::string_view text) {
  size_t begin = std::string_view::npos;
  int depth = 0;
  bool value = false;  // after a =, where [ isn't a header
  scan(text, [&](size_t at, char c) {
    if (c == '=' || (c == '\n' && depth == 0)) value = c == '=';
    if (c == '[' && value && ++depth == 1) begin = at;
    if (c == ']' && depth > 0) --depth;
  });
  return depth > 0 ? begin : std::string_view::npos;
}

// --- errors of toml++ in our words ---

// For descriptions that contain one of the signs (separated by |), or several in order (by *).
// {word}: the word at the place of the error; {next}: its character; {rest}: the line from there
// on; {before}: the line up to there; {list}: the line where the list that contains it begins.
struct Saying {
  std::string_view signs, what, hint;
};

constexpr Saying kSayings[] = {
    {"utf-8", "the file isn't valid UTF-8.", "save it as UTF-8."},
    {"maximum nested", "lists are nested too deeply.", "lists contain strings: [\"a\", \"b\"]."},
    {"after '\\r'", "a line ends in \\r without \\n.",
     "save the file with \\n at the end of lines."},
    {"comment: ", "a comment contains a control character.", "remove it."},
    {"scalar sequence: ", "\\u isn't followed by the 4 hexadecimal digits of a character (\\U: 8).",
     "é, for example, is \\u00E9."},
    {"escape sequence", "\\{next} isn't a valid escape.",
     "write a backslash as \\\\, or use '…', which has no escapes."},
    {"string: *(newline)|string: encountered", "a string isn't closed in its line.",
     "close it with its quote; \\n stands for a newline."},
    {"string: ", "a string contains a control character.", "write it as \\uXXXX."},
    {"pair: encountered*(after =)|pair: expected value|unexpected control", "a value is missing.",
     "write key = value."},
    {"pair: encountered|pair: expected '='", "a = is missing after \"{before}\".",
     "a line is key = value, [table] or # comment."},
    {"comment or whitespace", "unexpected \"{rest}\" at the end of the line.",
     "a line has one key and one value; strings need quotes."},
    {"header: encountered|header: expected ']'", "a ] is missing after {before}.",
     "close the table's name."},
    {"header: tables with blank|root table: |parsing key: ", "a key is missing before \"{rest}\".",
     "a line is key = value, and a key consists of letters, digits, _ and -."},
    {"array: encountered", "the list that begins in line {list} isn't closed.", "close it with ]."},
    {"array: expected comma", "a comma or ] is missing in the list.",
     "separate strings with commas: [\"a\", \"b\"]."},
    {"array: |(in a list)", "\"{rest}\" isn't a quoted string.",
     "the list that begins in line {list} contains strings: [\"a\", \"b\"]."},
    {"64 bits", "{word} doesn't fit in 64 bits.",
     "numbers go up to 1.8e308; write large ones with an exponent: 1e20."},
    {"inline table: ", "the table in braces isn't valid at \"{rest}\".",
     "write {key = value, …} in one line, or a [table] with its keys below it."},
    {"cannot insert", "a table in braces can't get more keys.", "write them into the braces."},
    {"", "\"{word}\" isn't a number, true or false.", "strings need quotes: \"{word}\"."},
};

bool has_signs(std::string_view text, std::string_view signs) {
  if (const size_t bar = signs.find('|'); bar != std::string_view::npos)
    return has_signs(text, signs.substr(0, bar)) || has_signs(text, signs.substr(bar + 1));
  const size_t star = signs.find('*'), at = text.find(signs.substr(0, star));
  if (at == std::string_view::npos) return false;
  return star == std::string_view::npos || has_signs(text.substr(at), signs.substr(star + 1));
}

using Fillings = std::vector<std::pair<std::string, std::string>>;

std::string filled(std::string_view saying, const Fillings& words) {
  std::string text(saying);
  for (const auto& [name, word] : words)
    if (size_t at = text.find(name); at != std::string::npos) text.replace(at, name.size(), word);
  return text;
}

std::string trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t"), end = text.find_last_not_of(" \t");
  return begin == std::string::npos ? "" : text.substr(begin, end - begin + 1);
}

[[noreturn]] void refuse_syntax(const TomlSource& source, const fsdp_toml::parse_error& error) {
  const std::string_view text = source.text();
  const size_t line = error.source().begin.line, at = source.offset(error.source().begin);
  const size_t word = at == 0 ? std::string_view::npos : text.find_last_of(kAroundWords, at - 1);
  const size_t next = source.offset({error.source().begin.line, error.source().begin.column + 1});
  const std::string before = source.between(source.line_begin(line), at);
  std::string facts(error.description());
  if (at < text.size() && (text[at] == '\n' || text[at] == '\r')) facts += " (newline)";
  if (before.find('=') != std::string::npos) facts += " (after =)";
  const size_t list = open_list(text.substr(0, at));
  if (list != std::string_view::npos) facts += " (in a list)";
  const Saying& saying = *std::find_if(std::begin(kSayings), std::end(kSayings),
                                       [&](auto& one) { return has_signs(facts, one.signs); });
  const Fillings words = {
      {"{word}", source.between(word + 1, text.find_first_of(kAroundWords, at))},
      {"{rest}", source.between(at, source.line_end(line))},
      {"{before}", trimmed(before)},
      {"{list}", std::to_string(source.line_at(std::min(list, text.size())))},
      {"{next}", source.between(at, std::min(next, source.line_end(line)))}};
  source.fail(line, filled(saying.what, words), filled(saying.hint, words));
}

// Where `name` or a part of it is set in what is above: " in line 3"; "" if that can't be read
// alone.
std::string place_of(const std::string& name, bool is_table, std::string_view above,
                     const std::string& file) try {
  const TomlDocument document = parse_toml(above, file);
  const bool inside = !is_table && !document.tables.empty();
  const std::string full = (inside ? document.tables.rbegin()->second + "." : "") + name;
  for (const auto& [line, table] : document.tables)
    if (table == full) return formatted(" in line {}", line);
  for (const TomlEntry& one : document.entries)
    if (one.name == full || one.name.starts_with(full + ".") || full.starts_with(one.name + "."))
      return formatted(" in line {}", one.line);
  return "";
} catch (const Error&) {
  return "";
}

// A key or table that is there already. toml++ doesn't say where: what is above it is read again.
[[noreturn]] void refuse_twice(const TomlSource& source, const fsdp_toml::parse_error& error) {
  const std::string_view what = error.description();
  const size_t line = error.source().begin.line, begin = source.line_begin(line);
  const std::string written = source.between(begin, source.line_end(line));
  const bool is_table = trimmed(written).starts_with("[");
  std::string name = trimmed(written.substr(0, written.find('=')));
  if (const size_t quote = what.find('\''); quote != std::string_view::npos)
    name = what.substr(quote + 1, what.rfind('\'') - quote - 1);
  const std::string where = place_of(name, is_table, source.text().substr(0, begin), source.file());
  if (is_table)
    source.fail(line, formatted("[{}] is already{}.", name, where.empty() ? " there" : where),
                "merge the two.");
  source.fail(line, formatted("\"{}\" is already set{}.", name, where), "remove one of the two.");
}

// --- from toml++'s tree to a list ---

TomlHeld value_of(const fsdp_toml::node& node, const TomlSource& source) {
  const size_t line = node.source().begin.line;
  if (auto* text = node.as_string()) return text->get();
  if (auto* whole = node.as_integer()) return whole->get();
  if (auto* real = node.as_floating_point()) return real->get();
  if (auto* flag = node.as_boolean()) return flag->get();
  if (node.is_table()) return {};
  const auto* array = node.as_array();
  if (!array) {
    const std::string date = source.part(node.source());
    source.fail(line, formatted("\"{}\" isn't a number, true or false.", date),
                formatted("strings need quotes: \"{}\".", date));
  }
  std::vector<std::string> items;
  for (const fsdp_toml::node& item : *array) {
    if (item.is_table() && !item.as_table()->is_inline())
      source.fail(line, "arrays of tables aren't supported.", "write [name] instead.");
    if (!item.is_string())
      source.fail(item.source().begin.line,
                  formatted("\"{}\" isn't a quoted string.", source.part(item.source())),
                  "lists contain strings: [\"a\", \"b\"].");
    items.push_back(item.as_string()->get());
  }
  return items;
}

bool is_bare(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
         c == '-';
}

void collect(const fsdp_toml::table& table, const std::string& prefix, const TomlSource& source,
             TomlDocument& document) {
  for (const auto& [key, node] : table) {
    const std::string name = prefix + std::string(key.str());
    const int line = static_cast<int>(key.source().begin.line);
    if (key.empty() || !std::all_of(key.begin(), key.end(), is_bare))
      source.fail(line, formatted("\"{}\" isn't a valid key.", key.str()),
                  "a line is key = value, and a key consists of letters, digits, _ and -.");
    const fsdp_toml::table* inner = node.as_table();
    if (!inner || (inner->is_inline() && inner->empty())) {
      document.entries.push_back({name, value_of(node, source), source.part(node.source()), line});
      continue;
    }
    const auto begin = inner->source().begin;
    if (source.text().substr(source.offset(begin)).starts_with("["))
      document.tables[static_cast<int>(begin.line)] = name;  // of [a.b]: a, then a.b
    collect(*inner, name + ".", source, document);
  }
}

}  // namespace

TomlDocument parse_toml(std::string_view text, const std::string& file) {
  const TomlSource source(text, file);
  check_letters(source);
  TomlDocument document;
  try {
    collect(fsdp_toml::parse(source.text()), "", source, document);
  } catch (const fsdp_toml::parse_error& error) {
    if (has_signs(error.description(), "cannot redefine")) refuse_twice(source, error);
    refuse_syntax(source, error);
  }
  std::stable_sort(document.entries.begin(), document.entries.end(),
                   [](const TomlEntry& a, const TomlEntry& b) { return a.line < b.line; });
  return document;
}

TomlHeld parse_toml_number(const std::string& word) {
  if (!std::all_of(word.begin(), word.end(),
                   [](char c) { return is_bare(c) || c == '+' || c == '.'; }))
    return {};
  try {
    const fsdp_toml::table table = fsdp_toml::parse("number = " + word);
    if (auto whole = table["number"].as_integer()) return whole->get();
    if (auto real = table["number"].as_floating_point()) return real->get();
  } catch (const fsdp_toml::parse_error&) {
  }
  return {};
}

std::string toml_string(std::string_view text) {
  std::string out = "\"";
  for (char c : text) {
    const size_t special = std::string_view("\"\\\n\r\t").find(c);
    if (special != std::string_view::npos) {
      out += {'\\', "\"\\nrt"[special]};
    } else if (is_control(c)) {
      out += formatted("\\u{:04X}", static_cast<unsigned char>(c));
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string toml_number(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char buffer[64];
  auto end = std::to_chars(buffer, buffer + sizeof buffer, value).ptr;
  std::string text(buffer, end);
  size_t exponent = text.find('e');
  if (exponent == std::string::npos)
    return text.find('.') == std::string::npos ? text + ".0" : text;
  // 1e-05 to 1e-5.
  bool falls = text[exponent + 1] == '-';
  size_t first = text.find_first_not_of("+-0", exponent + 1);
  return formatted("{}e{}{}", text.substr(0, exponent), falls ? "-" : "", text.substr(first));
}

}  // namespace fsdp::train
