// Normalisation form C: characters composed, marks in canonical order. Some tokenizers (Qwen 2.5)
// ask for it before anything else.
#pragma once

#include <string>
#include <string_view>

namespace fsdp::data {

// True if nothing can change: no character in it is a mark, has a decomposition or can be composed
// with the one before. Nearly all text, in one pass.
bool surely_nfc(std::string_view text);

// The text must be valid UTF-8. Cutting it before an ASCII character changes nothing: none of them
// combines with what lies before it.
std::string nfc(std::string_view text);

// The tables, written by unicode_tables.py.
struct CombiningRun {
  char32_t first, last;
  int combining_class;
};
extern const CombiningRun kCombiningRuns[];
extern const int kCombiningRunCount;
extern const char32_t kPairs[][3];  // a character, its two parts; the first may have parts itself
extern const int kPairCount;
extern const char32_t kSingles[][2];  // a character, the one it stands for
extern const int kSingleCount;
extern const char32_t kNeverComposed[];  // those of kPairs that are taken apart, but never made
extern const int kNeverComposedCount;

}  // namespace fsdp::data
