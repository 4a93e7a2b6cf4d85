// Pattern: the regular expressions that split text into words, with our own Unicode tables.
//
// The syntax is the subset of Oniguruma's that tokenizers use: alternatives, classes with \p{..}
// and \s, greedy and possessive repetition of a character, lookahead, (?i:..) for ASCII letters,
// optional groups. Anything else is refused when the pattern is parsed, never matched differently.
//
// We don't use a library because token ids depend on what \p{L} means: a library with another
// Unicode version would split new characters differently.
#pragma once

#include <array>
#include <bitset>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fsdp::data {

// A set of characters.
struct CharacterSet {
  std::array<bool, 256> low = {};                     // characters below 256
  uint32_t categories = 0;                            // general categories, for those above
  std::vector<std::pair<char32_t, char32_t>> ranges;  // likewise, both ends included
  bool negated = false;                               // inverts the two, but not `low`

  bool has(char32_t code) const;
};

// What matching on one text has cost and may cost. Every character that is looked at counts, and so
// does every step along a pattern, so the time is linear in the text whatever the pattern is.
class PatternBudget {
 public:
  // The patterns of known tokenizers look at a byte 25 times at most, on texts made to be slow
  // (tests/data/pattern_test.cpp).
  static constexpr int64_t kLooksPerByte = 200;

  // For `bytes` of text, each of which `passes` patterns may look at.
  explicit PatternBudget(size_t bytes, size_t passes = 1)
      : all_(100'000 + kLooksPerByte * static_cast<int64_t>(bytes * passes)), left_(all_) {}
  int64_t used() const { return all_ - left_; }
  // Counts other work on the text; the next look throws if the budget is used up.
  void spend(size_t bytes) { left_ -= static_cast<int64_t>(bytes); }

 private:
  friend class Pattern;
  int64_t all_, left_;
};

class Pattern {
 public:
  static constexpr size_t kNone = std::string_view::npos;

  // Throws Error for a pattern that isn't supported or that matches the empty text. `where`: the
  // file and part that it is from, for errors.
  explicit Pattern(std::string_view expression, std::string where = "a tokenizer");

  struct Match {
    size_t begin = kNone, end = kNone;
    bool reached_end = false;  // looked beyond the text: with more text, the match might differ
  };
  // The first match that begins at `from` or later. `text` must be valid UTF-8. The result depends
  // only on `text` and `from`, which parallel scanning relies on. Throws Error when the budget is
  // used up.
  Match find(std::string_view text, size_t from, PatternBudget& budget) const;

 private:
  friend class PatternParser;
  static constexpr uint32_t kMany = UINT32_MAX;
  static constexpr size_t kLongest = 4096;  // bytes of a pattern: matching recurses along it
  struct Node {
    enum Matches { kAccept, kSet, kEither, kLook } kind = kAccept;
    int next = -1;
    std::bitset<256> first;  // bytes that a match can begin with here; may include others
    bool empty = false;      // can match the empty text
    // kSet: `set`, repeated
    int set = -1;
    uint32_t min = 1, max = 1;
    bool possessive = false;
    bool gives_back = false;  // tries fewer repetitions if the rest doesn't match
    // kEither: branches in the order they are tried; each continues with what follows
    std::vector<int> branches;
    std::array<uint32_t, 256> candidates = {};  // the branches that can match, by the next byte
    uint32_t all = 0;                           // all branches
    // kLook
    int inner = -1;
    bool negative = false;
  };

  struct Scan {  // one search
    std::string_view text;
    int64_t& left;  // of the budget
    bool reached_end = false;
  };
  size_t match(int node, Scan& scan, size_t at) const;  // the end of the match, or kNone
  uint32_t take(const Node& node, Scan& scan, size_t& at) const;
  int add(Node node);  // the nodes it leads to must already exist

  std::string expression_, where_;
  std::vector<Node> nodes_;
  std::vector<CharacterSet> sets_;
  int start_ = -1;
};

}  // namespace fsdp::data
