#include "chat/casing.h"

namespace fsdp::chat {
namespace {

// Scripts and symbols without upper and lower case.
bool is_caseless(char32_t code) {
  return (code >= 0x590 && code < 0x10a0) || (code >= 0x1100 && code < 0x13a0) ||
         (code >= 0x2000 && code < 0x2100) || (code >= 0x2190 && code < 0x24b0) ||
         (code >= 0x2500 && code < 0x2c00) || (code >= 0x2e00 && code < 0xa640) ||
         (code >= 0xac00 && code < 0xfb00) || (code >= 0xfe00 && code < 0xff21) ||
         (code >= 0x1f200 && code <= 0x10ffff);
}

bool is_upper(char32_t code) {
  return (code >= 'A' && code <= 'Z') || (code >= 0xc0 && code <= 0xde && code != 0xd7);
}
bool is_lower(char32_t code) {
  return (code >= 'a' && code <= 'z') || (code >= 0xe0 && code <= 0xfe && code != 0xf7);
}

// Whether the functions above know its case.
bool is_known(char32_t code) {
  if (code < 0x100)
    return code != 0xaa && code != 0xb5 && code != 0xba && code != 0xdf && code != 0xff;
  return is_caseless(code);
}

void check_known(Machine& machine, std::string_view text, char32_t code) {
  if (is_known(code)) return;
  std::string character;
  put_code(character, code);
  machine.refuse("the case of \"" + character + "\" (in \"" + std::string(text.substr(0, 60)) +
                 "\") isn't supported: only that of ASCII and Latin-1 is");
}

}  // namespace

Text with_case(Machine& machine, const Text& text, Case wanted) {
  machine.make(text.size());
  Text out;
  bool inside_word = false, first = true;
  size_t at = 0;
  for (const Run& run : text.runs()) {
    std::string changed;
    for (; at < run.end; ++at) {
      if (continues_code(text.bytes()[at])) continue;
      const char32_t code = code_at(text.bytes(), at);
      check_known(machine, text.bytes(), code);
      const bool upper = is_upper(code), lower = is_lower(code);
      const bool raise = wanted == Case::kUpper || (wanted == Case::kTitle && !inside_word) ||
                         (wanted == Case::kCapital && first) || (wanted == Case::kSwapped && lower);
      put_code(changed, raise && lower ? code - 0x20 : !raise && upper ? code + 0x20 : code);
      inside_word = upper || lower;
      first = false;
    }
    out.append(changed, run.origin);
  }
  return out;
}

Letters letters_of(Machine& machine, std::string_view text) {
  Letters letters;
  for (size_t i = 0; i < text.size(); ++i) {
    if (continues_code(text[i])) continue;
    const char32_t code = code_at(text, i);
    check_known(machine, text, code);
    letters.upper = letters.upper || is_upper(code);
    letters.lower = letters.lower || is_lower(code);
  }
  return letters;
}

}  // namespace fsdp::chat
