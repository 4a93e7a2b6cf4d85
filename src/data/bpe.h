// Bpe: a model that spells a word and merges pairs of symbols in the order of the merge list.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/model.h"
#include "data/spelling.h"

namespace fsdp::data {

class Bpe : public Model {
 public:
  struct Merge {
    int32_t left, right, result;
  };
  // `merges` are in order; of two entries for a pair, the later counts. `words`: with
  // ignore_merges, words that are a single token.
  Bpe(std::unique_ptr<const Spelling> spelling, const std::vector<Merge>& merges,
      std::unordered_map<std::string, int32_t> words);

  std::unique_ptr<Scratch> scratch() const override;
  void encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const override;

 private:
  class Memory;
  struct Entry {
    uint64_t pair = UINT64_MAX;  // left and right; all ones: free
    uint32_t rank = 0;
    int32_t id = 0;
  };
  const Entry* find(int32_t left, int32_t right) const;  // null: the two don't merge
  void merge(std::string_view word, Memory& memory, std::vector<int32_t>& ids) const;
  void merge_few(std::vector<int32_t>& spelled, std::vector<int32_t>& ids) const;
  void merge_many(Memory& memory, std::vector<int32_t>& ids) const;

  std::unique_ptr<const Spelling> spelling_;
  std::unordered_map<std::string, int32_t> words_;
  std::vector<Entry> table_;  // open addressing, at most half full
  uint64_t mask_ = 0;
};

}  // namespace fsdp::data
