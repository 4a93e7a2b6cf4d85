// UTF-8, and the general category of characters, which tokenizers' patterns use. The tables are our
// own (unicode_tables.py), so that ids don't depend on a library's Unicode version.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace fsdp::data {

// Unicode's general categories, in the order of unicode_tables.py.
// clang-format off
enum class Category : uint8_t {
  Cn, Lu, Ll, Lt, Lm, Lo, Mn, Mc, Me, Nd, Nl, No, Pc, Pd, Ps, Pe, Pi, Pf, Po, Sm, Sc, Sk, So,
  Zs, Zl, Zp, Cc, Cf, Co,
};
// clang-format on

constexpr uint32_t bit(Category category) {
  return uint32_t{1} << static_cast<int>(category);
}
// The set of categories with a name such as "L" or "Lu"; 0 if the name is unknown.
uint32_t category_mask(std::string_view name);

Category category(char32_t code);

// White space as the `tokenizers` package defines it: separators, and the control characters that
// move the cursor.
bool is_space(char32_t code);
// A word character: alphabetic, a mark, a digit or a connector. For added tokens with single_word.
bool is_word(char32_t code);

// Returns the character that starts at text[at] and moves `at` past it. The text must be valid
// UTF-8.
inline char32_t next_code(std::string_view text, size_t& at) {
  auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  unsigned char lead = byte(at);
  if (lead < 0x80) return at += 1, lead;
  if (lead < 0xe0) {
    at += 2;
    return char32_t(lead & 0x1f) << 6 | (byte(at - 1) & 0x3f);
  }
  if (lead < 0xf0) {
    at += 3;
    return char32_t(lead & 0x0f) << 12 | (byte(at - 2) & 0x3f) << 6 | (byte(at - 1) & 0x3f);
  }
  at += 4;
  return char32_t(lead & 0x07) << 18 | (byte(at - 3) & 0x3f) << 12 | (byte(at - 2) & 0x3f) << 6 |
         (byte(at - 1) & 0x3f);
}

inline bool continues(char c) {
  return (static_cast<unsigned char>(c) & 0xc0) == 0x80;
}

void append_utf8(std::string& out, char32_t code);

// The character at some byte of a text.
struct Utf8Step {
  int length;       // of the character; if ill-formed, of the longest part that could begin one
  bool valid;       // a complete character
  bool incomplete;  // the text ends within the character
};
Utf8Step utf8_step(std::string_view text, size_t at);

// Length of the longest prefix that is valid UTF-8.
size_t valid_prefix(std::string_view text);
// `text` with each ill-formed part (the longest that could begin a character) replaced by U+FFFD,
// as Python's bytes.decode("utf-8", "replace") does.
std::string repaired(std::string_view text);

// The tables. For each run of characters of one category, kCategoryRuns has first * 32 + category.
extern const uint32_t kCategoryRuns[];
extern const int kCategoryRunCount;

}  // namespace fsdp::data
