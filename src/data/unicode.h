// UTF-8 and what a tokenizer's patterns ask about characters: their general category. The tables
// are our own (unicode_tables.py), so that ids depend on no library's version of Unicode.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace fsdp::data {

// Unicode's general categories. The order is that of unicode_tables.py.
// clang-format off
enum class Category : uint8_t {
  Cn, Lu, Ll, Lt, Lm, Lo, Mn, Mc, Me, Nd, Nl, No, Pc, Pd, Ps, Pe, Pi, Pf, Po, Sm, Sc, Sk, So,
  Zs, Zl, Zp, Cc, Cf, Co,
};
// clang-format on

constexpr uint32_t bit(Category category) {
  return uint32_t{1} << static_cast<int>(category);
}
// A set of categories by its name, "L" or "Lu"; 0 if there is no such name.
uint32_t category_mask(std::string_view name);

Category category(char32_t code);

// White space as the package's patterns see it: the separators, and the controls that move the
// cursor.
bool is_space(char32_t code);
// A character of a word: alphabetic, a mark, a digit, a connector. For added tokens that must be
// words.
bool is_word(char32_t code);

// The character that starts at text[at], and `at` moved behind it. The text must be valid UTF-8.
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

// How a text goes on at some byte.
struct Utf8Step {
  int length;  // of the character; or, where there is none, of the longest part that could begin
               // one
  bool valid;  // a whole character
  bool incomplete;  // the text ends where the character goes on
};
Utf8Step utf8_step(std::string_view text, size_t at);

// The length of the part at the front that is valid UTF-8.
size_t valid_prefix(std::string_view text);
// `text` with each ill-formed part (the longest that could begin a character) replaced by U+FFFD,
// as Python's bytes.decode("utf-8", "replace") does.
std::string repaired(std::string_view text);

// The tables. kCategoryRuns holds, for each run of characters of one category, first * 32 +
// category.
extern const uint32_t kCategoryRuns[];
extern const int kCategoryRunCount;

}  // namespace fsdp::data
