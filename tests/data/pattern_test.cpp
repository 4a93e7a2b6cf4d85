// Patterns: what they match, and that unsupported ones are refused. package_test.cpp checks that
// they split real text as the `tokenizers` package does.
#include "data/pattern.h"

#include <gtest/gtest.h>

#include "data/folders.h"
#include "data/nfc.h"
#include "data/unicode.h"

namespace fsdp::data {
namespace {

std::string matches(const char* expression, std::string_view text) {
  Pattern pattern(expression);
  std::string found;
  for (size_t at = 0; at < text.size();) {
    auto [begin, end] = pattern.find(text, at);
    if (begin == Pattern::kNone) break;
    found += "[" + std::string(text.substr(begin, end - begin)) + "]";
    at = end;
  }
  return found;
}

TEST(Patterns, MatchAsTheirPartsSay) {
  EXPECT_EQ(matches("a|ab", "abab"), "[a][a]");  // the first that matches, not the longest
  EXPECT_EQ(matches("ab|a", "aab"), "[a][ab]");
  EXPECT_EQ(matches("a{2}", "aaaaa"), "[aa][aa]");
  EXPECT_EQ(matches("a{1,2}b", "aaab ab b"), "[aab][ab]");
  EXPECT_EQ(matches("a{2,}", "a aa aaaa"), "[aa][aaaa]");
  EXPECT_EQ(matches("a{,2}b", "aaab"), "[aab]");
  EXPECT_EQ(matches("[a-c]+c", "abcabcd"), "[abcabc]");  // gives back
  EXPECT_EQ(matches("[a-c]++c|d", "abcabcd"), "[d]");    // doesn't
  EXPECT_EQ(matches("a(?=b)", "abac"), "[a]");
  EXPECT_EQ(matches("a(?!b)", "abac"), "[a]");
  EXPECT_EQ(matches("a(?!b)", "ab"), "");
  EXPECT_EQ(matches("x(?:ab|a)?b", "xab xb xabb"), "[xab][xb][xabb]");
  EXPECT_EQ(matches("(?i:'s|k)", "'S 'ſ K k \u212a"), "['S]['ſ][K][k][\u212a]");
  EXPECT_EQ(matches("[^\\s\\p{L}]+", "ab, é! 12"), "[,][!][12]");
  EXPECT_EQ(matches("\\s+(?!\\S)|\\s+", "a   b  "), "[  ][ ][  ]");
  EXPECT_EQ(matches("\\p{Lu}\\p{Ll}+", "Ab ÉéA"), "[Ab][Éé]");
  EXPECT_EQ(matches("[\\P{L}]", "a1é"), "[1]");
  EXPECT_EQ(matches("\\d+", "12٣x"), "[12٣]");
  EXPECT_EQ(matches("[\\u4e00-\\u4eff]+", "a一丁b"), "[一丁]");
  EXPECT_EQ(matches("[\\]\\-a]+", "a]-b"), "[a]-]");
  EXPECT_EQ(matches("\\.|\\x41|\\x{e9}", ".Aé"), "[.][A][é]");
  EXPECT_EQ(matches(".+", "a\nb"), "[a][b]");
}

TEST(Patterns, SpacesAreThoseOfUnicodeAndNoOthers) {
  EXPECT_EQ(matches("\\s", "\u0085\u00a0\u1680\u2028\u3000"),
            "[\u0085][\u00a0][\u1680][\u2028][\u3000]");
  EXPECT_EQ(matches("\\s", "\u180e\u200b\ufeff"), "");
}

TEST(Patterns, WhatIsNotUnderstoodIsRefused) {
  for (const char* expression :
       {"\\w+",       "\\b",     "^a",          "a$",          "a*?",    "a+?",
        "a??",        "(a|b)+",  "(a)*",        "(?<=a)b",     "(?>a)",  "(?<n>a)",
        "(?i)a",      "(?m:a)",  "[a&&b]",      "[[a]]",       "[]",     "[a",
        "(a",         "a)",      "a|*",         "+",           "\\",     "\\p{Han}",
        "\\p{Greek}", "\\pL",    "\\p{",        "[z-a]",       "a{3,2}", "a{0}",
        "a{",         "a{1,2}+", "a**",         "(?i:ss)",     "(?i:é)", "(?i:\\p{Lu})",
        "\\1",        "\\h",     "[[:alpha:]]", "\\x{110000}", "\\xg",   "\\u12"}) {
    std::string error = test::error_of([&] { Pattern pattern(expression); });
    EXPECT_TRUE(test::contains(error, expression) && test::contains(error, "HINT"))
        << expression << ": " << error;
  }
  for (const char* expression : {"", "a*", "a?|b", "(?=a)", "(?:a)?"}) {
    EXPECT_TRUE(test::contains(test::error_of([&] { Pattern pattern(expression); }), "empty"))
        << expression;
  }
  std::string deep(2'000, '(');
  EXPECT_TRUE(
      test::contains(test::error_of([&] { Pattern pattern(deep); }), "more than 50 nested groups"));
  std::string endless(100'000, 'a');
  EXPECT_TRUE(test::contains(test::error_of([&] { Pattern pattern(endless); }), "HINT"));
}

// Python's bytes.decode("utf-8", "replace") is the oracle; these are its answers.
TEST(Utf8, IllFormedPartsBecomeOneReplacementEach) {
  const std::string mark = "\xef\xbf\xbd";
  struct Case {
    std::string bytes;
    int marks;
  };
  for (const Case& entry : {Case{"\x80", 1},
                            {"\xc0\xaf", 2},
                            {"\xc3", 1},
                            {"\xe2\x82", 1},
                            {"\xe0\x80\xaf", 3},
                            {"\xed\xa0\x80", 3},
                            {"\xf0\x9f\x98", 1},
                            {"\xf0\x80\x80\x80", 4},
                            {"\xf4\x90\x80\x80", 4},
                            {"\xf8\x88\x80", 3},
                            {"\xff\xfe", 2},
                            {"\xf1\x80\x80\xc3", 2}}) {
    std::string expected = "a";
    for (int i = 0; i < entry.marks; ++i) expected += mark;
    EXPECT_EQ(repaired("a" + entry.bytes + "é"), expected + "é");
    EXPECT_EQ(valid_prefix("a" + entry.bytes), 1u);
  }
  std::string good = "aé漢😀\u0000x";
  EXPECT_EQ(repaired(good), good);
}

TEST(Nfc, ComposesAndOrders) {
  EXPECT_EQ(nfc("e\u0301"), "\u00e9");
  EXPECT_EQ(nfc("a\u0301\u0323"), "\u1ea1\u0301");  // the dot below comes first
  EXPECT_EQ(nfc("\u1100\u1161\u11a8"), "\uac01");   // Hangul
  EXPECT_EQ(nfc("\uac00\u11a8"), "\uac01");
  EXPECT_EQ(nfc("\u212b\u2126"), "\u00c5\u03a9");    // replaced by another character
  EXPECT_EQ(nfc("\ufb2c"), "\u05e9\u05bc\u05c1");    // never composed
  EXPECT_EQ(nfc("\u0301a"), "\u0301a");              // a mark without a letter
  EXPECT_EQ(nfc("a\u0346\u0301"), "a\u0346\u0301");  // a mark of the same class is between
  EXPECT_EQ(nfc("a\u0315\u0300\u05ae\u0300b"), "\u00e0\u05ae\u0300\u0315b");
  EXPECT_TRUE(surely_nfc("plain \u00e9 \uac01 漢"));
  EXPECT_FALSE(surely_nfc("e\u0301"));
  EXPECT_FALSE(surely_nfc("\u1100\u1161"));
}

}  // namespace
}  // namespace fsdp::data
