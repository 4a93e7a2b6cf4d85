// Added tokens: those that are looked for in the text itself, before it is cut into words.
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
  bool single_word = false;  // only where no character of a word stands beside it
  bool lstrip = false;       // takes the white space before it along
  bool rstrip = false;       // and behind it
  bool normalized = false;   // is looked for after normalisation, itself normalised
};

class AddedTokens {
 public:
  struct Found {
    size_t begin, end;
    int32_t id;
  };

  explicit AddedTokens(std::vector<AddedToken> tokens);

  // All of them, from left to right; at one place the longest. Two may share the white space
  // between them. The text must be valid UTF-8.
  std::vector<Found> find(std::string_view text, int threads) const;
  bool empty() const { return tokens_.empty(); }

 private:
  struct Node {  // of a trie over bytes
    std::vector<std::pair<unsigned char, int>> next;
    int token = -1;  // that ends here
  };
  struct Candidate {
    size_t begin, end;
    int token;
  };
  void look(std::string_view text, size_t from, size_t to, std::vector<Candidate>& found) const;

  std::vector<AddedToken> tokens_;
  std::vector<Node> trie_;
  std::bitset<256> starts_;  // bytes with which one begins
  int only_start_ = -1;      // if they all begin with one byte
};

}  // namespace fsdp::data
