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

class Pattern {
 public:
  static constexpr size_t kNone = std::string_view::npos;

  // Throws Error for a pattern that isn't supported or that matches the empty text.
  explicit Pattern(std::string_view expression);

  // The first match that begins at `from` or later, or {kNone, kNone}. `text` must be valid UTF-8.
  // The result depends only on `text` and `from`, which parallel scanning relies on. Throws Error
  // if backtracking takes too many tries.
  std::pair<size_t, size_t> find(std::string_view text, size_t from) const;

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

  // The end of the match, or kNone. Every try decrements `tries`; throws Error when none are left.
  size_t match(int node, std::string_view text, size_t at, int64_t& tries) const;
  uint32_t take(const Node& node, std::string_view text, size_t& at) const;
  int add(Node node);  // the nodes it leads to must already exist

  std::vector<Node> nodes_;
  std::vector<CharacterSet> sets_;
  int start_ = -1;
};

}  // namespace fsdp::data
