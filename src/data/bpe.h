// Bpe: encodes a word's bytes as token ids, by merging pairs in the order of the merge list.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace fsdp::data {

// Byte-level vocabularies spell each byte as a printable character; a space, for example, is
// U+0120. Returns the bytes that `token` spells, or `token` itself if it has any other character.
std::string bytes_of_token(std::string_view token);
std::string token_of_byte(unsigned char byte);

// A thread's working memory for encoding: space for merges, and a cache of recent words.
class BpeScratch {
 public:
  BpeScratch() : slots_(kSlots) {}

 private:
  friend class Bpe;
  static constexpr size_t kSlots = size_t{1} << 15;
  static constexpr size_t kKey = 22;  // bytes; with kKey and kIds a slot is one cache line
  static constexpr size_t kIds = 10;
  struct Slot {
    uint8_t length = 0, count = 0;
    char key[kKey] = {};
    int32_t ids[kIds] = {};
  };
  struct Symbol {
    int32_t id;
    int32_t previous, next;  // -1: none
    bool alive;
  };
  struct Candidate {
    uint32_t rank;
    int32_t at;  // of the left symbol
    int32_t id;  // of the merged token
  };

  std::vector<Slot> slots_;
  std::vector<Symbol> symbols_;
  std::vector<Candidate> heap_;
};

class Bpe {
 public:
  struct Merge {
    int32_t left, right, result;
  };
  // `byte_ids`: the token of each byte, or -1 if the vocabulary has none; such bytes are dropped,
  // as in the `tokenizers` package. `merges` are in order; of two entries for a pair, the later
  // counts. `words`: with ignore_merges, words that are a single token.
  Bpe(const std::array<int32_t, 256>& byte_ids, const std::vector<Merge>& merges,
      std::unordered_map<std::string, int32_t> words);

  void encode(std::string_view word, BpeScratch& scratch, std::vector<int32_t>& ids) const;

 private:
  struct Entry {
    uint64_t pair = UINT64_MAX;  // left and right; all ones: free
    uint32_t rank = 0;
    int32_t id = 0;
  };
  const Entry* find(int32_t left, int32_t right) const;  // null: the two don't merge
  void merge(std::string_view word, BpeScratch& scratch, std::vector<int32_t>& ids) const;
  void merge_short(std::string_view word, std::vector<int32_t>& ids) const;
  void merge_long(std::string_view word, BpeScratch& scratch, std::vector<int32_t>& ids) const;

  std::array<int32_t, 256> byte_ids_;
  std::unordered_map<std::string, int32_t> words_;
  std::vector<Entry> table_;  // open addressing, at most half full
  uint64_t mask_ = 0;
};

}  // namespace fsdp::data
