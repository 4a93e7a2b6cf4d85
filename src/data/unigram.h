// Unigram: a model that takes, of all ways to cut a word into tokens, the one whose tokens' scores
// have the largest sum.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/model.h"

namespace fsdp::data {

class Unigram : public Model {
 public:
  // Bytes of a token: so many are looked at from each character of a word.
  static constexpr size_t kLongest = 1000;

  // Tokens and their scores, by id. `unknown`: the token of what has no other. With
  // `byte_fallback` that is spelled by its bytes' <0x..> instead, if all are in the vocabulary.
  Unigram(const std::vector<std::pair<std::string, double>>& vocabulary, int32_t unknown,
          bool byte_fallback);

  std::unique_ptr<Scratch> scratch() const override;
  void encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const override;

 private:
  class Memory;
  struct Edge {                  // of a trie over bytes
    uint64_t from = UINT64_MAX;  // node and byte; all ones: free
    int32_t to = 0;
  };
  int32_t follow(int32_t node, unsigned char byte) const;  // -1: nowhere
  void add(std::string_view token, int32_t id);
  int32_t find(std::string_view token) const;  // -1: not in the vocabulary
  void search(std::string_view word, Memory& memory) const;
  void collect(std::string_view word, Memory& memory, std::vector<int32_t>& ids) const;
  void append_unknown(std::string_view text, std::vector<int32_t>& ids) const;

  std::vector<Edge> edges_;      // open addressing, at most half full
  std::vector<int32_t> tokens_;  // of each node of the trie; -1: none ends there
  std::vector<double> scores_;   // of each token
  std::array<int32_t, 256> bytes_;
  int32_t unknown_;
  bool byte_fallback_;
  double unknown_score_ = 0;
};

}  // namespace fsdp::data
