// Added tokens: tokens that are searched for in the text itself, before it is split into words.
#pragma once

#include <bitset>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::data {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool special = false;
  bool single_word = false;  // matches only if no word character is next to it
  bool lstrip = false;       // includes the white space before it
  bool rstrip = false;       // includes the white space after it
  bool normalized = false;   // matched after normalization, and itself normalized
};

class AddedTokens {
 public:
  struct Found {
    size_t begin, end;
    int32_t id;
  };

  explicit AddedTokens(std::vector<AddedToken> tokens);

  // All matches from left to right; the longest at each position. Two may share the white space
  // between them. The text must be valid UTF-8.
  std::vector<Found> find(std::string_view text, int threads) const;
  bool empty() const { return tokens_.empty(); }

 private:
  struct Node {  // of a trie over bytes
    std::vector<std::pair<unsigned char, int>> next;
    int token = -1;  // the token that ends here
  };
  struct Candidate {
    size_t begin, end;
    int token;
  };
  void look(std::string_view text, size_t from, size_t to, std::vector<Candidate>& found) const;

  std::vector<AddedToken> tokens_;
  std::vector<Node> trie_;
  std::bitset<256> starts_;  // first bytes of all tokens
  int only_start_ = -1;      // the first byte, if all tokens have the same
};

}  // namespace fsdp::data
