// Patterns: what they match, and that unsupported ones are refused. package_test.cpp checks that
// they split real text as the `tokenizers` package does.
#include "data/pattern.h"

#include <gtest/gtest.h>

#include "base/deadline.h"
#include "data/folders.h"
#include "data/nfc.h"
#include "data/unicode.h"

namespace fsdp::data {
namespace {

std::string matches(const char* expression, std::string_view text) {
  Pattern pattern(expression);
  PatternBudget budget(text.size());
  std::string found;
  for (size_t at = 0; at < text.size();) {
    const auto match = pattern.find(text, at, budget);
    if (match.begin == Pattern::kNone) break;
    found += "[" + std::string(text.substr(match.begin, match.end - match.begin)) + "]";
    at = match.end;
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

// The patterns of GPT-2, Qwen 2.5, Llama 3, GPT-4o and DeepSeek V3.
const char* const kKnown[] = {
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)",
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
    R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
};

// Texts that make a pattern look far and then go back: long runs of one kind, alternating kinds,
// and runs that end where a pattern hopes for something else.
std::vector<std::string> slow_texts() {
  const std::vector<std::string> kinds = {" ", "\n", "\r\n", "\t", "a", "A",      "é",      "漢",
                                          "1", "'",  "'s",   "!",  "/", "\u0301", "\u00a0", "😀"};
  std::vector<std::string> texts;
  const auto run = [](const std::string& of, size_t bytes) {
    std::string all;
    while (all.size() < bytes) all += of;
    return all;
  };
  for (const std::string& kind : kinds) {
    for (const std::string& other : kinds) {
      texts.push_back(run(kind, 5'000) + other);
      texts.push_back(run(kind + other, 5'000));
      texts.push_back(run(run(kind, 50) + other, 5'000));
      texts.push_back(run(kind + run(other, 700), 5'000));
    }
  }
  return texts;
}

TEST(PatternCosts, KnownPatternsAreFarFromTheLimitOnAnyText) {
  double most = 0;  // looks per byte
  for (const char* expression : kKnown) {
    const Pattern pattern(expression);
    for (const std::string& text : slow_texts()) {
      PatternBudget budget(text.size());
      for (size_t at = 0; at < text.size();) at = pattern.find(text, at, budget).end;
      most = std::max(most, static_cast<double>(budget.used()) / static_cast<double>(text.size()));
    }
  }
  EXPECT_LE(most, 25) << "looks per byte";
  EXPECT_GE(most, 1);
}

// Each looks at all of the rest of the text, at every character.
TEST(PatternCosts, TimeIsLinearInTheTextWhateverThePatternIs) {
  const test::WithDeadline deadline;
  const std::string text(100'000, 'a');
  for (const char* expression : {"[^z]++z|[^z]", "[^z]+z|[^z]", "[^z]*+z|[^z]", "(?=[^z]*z)a|a",
                                 "a(?![^z]*z)b|a", "a{1,99999}z|a", "[^z]*z"}) {
    const Pattern pattern(expression, "model/tokenizer.json: pre_tokenizer");
    PatternBudget budget(text.size());
    const std::string error = test::error_of([&] {
      for (size_t at = 0; at < text.size();)
        at = std::min(pattern.find(text, at, budget).end, text.size());
    });
    EXPECT_TRUE(test::contains(error, expression)) << error;
    EXPECT_TRUE(test::contains(error, "model/tokenizer.json")) << error;
  }
}

TEST(PatternCosts, AFindSaysWhetherMoreTextCouldChangeIt) {
  const auto reached = [](const char* expression, std::string_view text) {
    PatternBudget budget(text.size());
    return Pattern(expression).find(text, 0, budget).reached_end;
  };
  EXPECT_TRUE(reached("a+", "aaa"));
  EXPECT_FALSE(reached("a+", "aab"));
  EXPECT_FALSE(reached("a{2}", "aa"));
  EXPECT_TRUE(reached("a(?!b)", "a"));
  EXPECT_FALSE(reached("a(?!b)", "ac"));
  EXPECT_TRUE(reached("a(?:b|c)?", "a"));
  EXPECT_TRUE(reached("z", "aaa"));
  EXPECT_TRUE(reached("ab|a", "a"));
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
