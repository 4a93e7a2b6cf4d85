// WordCache: the ids of recent short words. Most words of a text have just been encoded.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

namespace fsdp::data {

// A multiplicative hash of 64 bits.
inline uint64_t mix(uint64_t value) {
  value *= 0x9e3779b97f4a7c15ull;
  return value ^ value >> 32;
}

class WordCache {
 public:
  WordCache() : slots_(kSlots) {}

  // Appends the ids of `word`: those that are cached, or those that encode() appends.
  template <class Encode>
  void encode(std::string_view word, std::vector<int32_t>& ids, Encode encode) {
    if (word.size() > kKey) return encode();
    Slot& slot = slots_[hash(word) & (kSlots - 1)];
    if (slot.length == word.size() && !std::memcmp(slot.key, word.data(), word.size())) {
      for (int i = 0; i < slot.count; ++i) ids.push_back(slot.ids[i]);
      return;
    }
    const size_t before = ids.size();
    encode();
    const size_t count = ids.size() - before;
    if (count > kIds) return;
    slot.length = static_cast<uint8_t>(word.size());
    slot.count = static_cast<uint8_t>(count);
    std::memcpy(slot.key, word.data(), word.size());
    std::copy(ids.end() - static_cast<ptrdiff_t>(count), ids.end(), slot.ids);
  }

 private:
  static constexpr size_t kSlots = size_t{1} << 15;
  static constexpr size_t kKey = 22;  // bytes; with kKey and kIds a slot is one cache line
  static constexpr size_t kIds = 10;
  struct Slot {
    uint8_t length = 0, count = 0;
    char key[kKey] = {};
    int32_t ids[kIds] = {};
  };

  static uint64_t hash(std::string_view word) {
    uint64_t value = word.size();
    while (word.size() >= 8) {
      uint64_t eight;
      std::memcpy(&eight, word.data(), 8);
      value = mix(value ^ eight);
      word.remove_prefix(8);
    }
    uint64_t rest = 0;
    std::memcpy(&rest, word.data(), word.size());
    return mix(value ^ rest);
  }

  std::vector<Slot> slots_;
};

}  // namespace fsdp::data
