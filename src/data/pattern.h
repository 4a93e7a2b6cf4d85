// Pattern: the regular expressions by which tokenizers cut text into words, with our own Unicode.
//
// The syntax is the part of Oniguruma's that such patterns use: alternatives, classes with \p{..}
// and \s, greedy and possessive repetition of a character, lookahead, (?i:..) for ASCII letters,
// optional groups. What is not understood is refused when the pattern is read, never matched in
// another way.
//
// There are libraries for this, but what \p{L} means is part of a token's id: a library of another
// Unicode version would cut new characters differently.
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
  std::vector<std::pair<char32_t, char32_t>> ranges;  // and ranges of them, both ends included
  bool negated = false;                               // for those above; `low` is as it is

  bool has(char32_t code) const;
};

class Pattern {
 public:
  static constexpr size_t kNone = std::string_view::npos;

  // Throws Error for a pattern that is not understood or that matches the empty text.
  explicit Pattern(std::string_view expression);

  // The first match that begins at `from` or later, in valid UTF-8: {kNone, kNone} if there is
  // none. The result depends on `text` and `from` alone, which parallel scanning relies on. Throws
  // Error where a pattern tries so many ways that it would not end.
  std::pair<size_t, size_t> find(std::string_view text, size_t from) const;

 private:
  friend class PatternParser;
  static constexpr uint32_t kMany = UINT32_MAX;
  static constexpr size_t kLongest = 4096;  // bytes of a pattern: matching recurses along it
  struct Node {
    enum Kind { kAccept, kSet, kEither, kLook } kind = kAccept;
    int next = -1;
    std::bitset<256> first;  // bytes with which a match can begin here; more than the truth is fine
    bool empty = false;      // can match nothing at all
    // kSet: `set`, repeated
    int set = -1;
    uint32_t min = 1, max = 1;
    bool possessive = false;
    bool gives_back = false;  // whether fewer are tried when what follows does not match
    // kEither: branches in the order in which they are tried; each goes on to what follows by
    // itself
    std::vector<int> branches;
    std::array<uint32_t, 256> candidates =
        {};            // by the next byte, the branches that can match at all
    uint32_t all = 0;  // all branches
    // kLook
    int inner = -1;
    bool negative = false;
  };

  // The end, or kNone. Every try takes from `tries`; an Error when there are none left.
  size_t match(int node, std::string_view text, size_t at, int64_t& tries) const;
  uint32_t take(const Node& node, std::string_view text, size_t& at) const;
  int add(Node node);  // the nodes that it leads to must be there already

  std::vector<Node> nodes_;
  std::vector<CharacterSet> sets_;
  int start_ = -1;
};

}  // namespace fsdp::data
