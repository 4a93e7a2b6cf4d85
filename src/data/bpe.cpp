// Short words are merged in an array, in O(n²) without allocation; long ones with a heap, in
// O(n log n). Both merge the pair with the lowest rank first and, of equal ranks, the leftmost.
#include "data/bpe.h"

#include <algorithm>
#include <cstring>

#include "data/unicode.h"

namespace fsdp::data {
namespace {

constexpr size_t kShortWord = 40;  // bytes
constexpr uint32_t kNever = UINT32_MAX;

// The character that spells a byte: the byte itself if it is printable, otherwise the next unused
// one from 256 on.
struct Alphabet {
  std::array<char32_t, 256> of_byte;
  std::unordered_map<char32_t, unsigned char> byte_of;

  Alphabet() {
    char32_t free = 256;
    for (char32_t byte = 0; byte < 256; ++byte) {
      bool seen = (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
      of_byte[byte] = seen ? byte : free++;
      byte_of[of_byte[byte]] = static_cast<unsigned char>(byte);
    }
  }
};

const Alphabet& alphabet() {
  static const Alphabet alphabet;
  return alphabet;
}

uint64_t mix(uint64_t value) {
  value *= 0x9e3779b97f4a7c15ull;
  return value ^ value >> 32;
}

uint64_t hash(std::string_view word) {
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

uint64_t merge_key(int32_t left, int32_t right) {
  return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
}

}  // namespace

std::string bytes_of_token(std::string_view token) {
  std::string bytes;
  for (size_t at = 0; at < token.size();) {
    auto found = alphabet().byte_of.find(next_code(token, at));
    if (found == alphabet().byte_of.end()) return std::string(token);
    bytes.push_back(static_cast<char>(found->second));
  }
  return bytes;
}

std::string token_of_byte(unsigned char byte) {
  std::string token;
  append_utf8(token, alphabet().of_byte[byte]);
  return token;
}

Bpe::Bpe(const std::array<int32_t, 256>& byte_ids, const std::vector<Merge>& merges,
         std::unordered_map<std::string, int32_t> words)
    : byte_ids_(byte_ids), words_(std::move(words)) {
  size_t size = 16;
  while (size < merges.size() * 2) size *= 2;
  table_.resize(size);
  mask_ = size - 1;
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    uint64_t pair = merge_key(merges[rank].left, merges[rank].right);
    uint64_t at = mix(pair) & mask_;
    while (table_[at].pair != UINT64_MAX && table_[at].pair != pair) at = (at + 1) & mask_;
    table_[at] = {pair, static_cast<uint32_t>(rank), merges[rank].result};
  }
}

const Bpe::Entry* Bpe::find(int32_t left, int32_t right) const {
  uint64_t pair = merge_key(left, right);
  for (uint64_t at = mix(pair) & mask_;; at = (at + 1) & mask_) {
    if (table_[at].pair == pair) return &table_[at];
    if (table_[at].pair == UINT64_MAX) return nullptr;
  }
}

void Bpe::encode(std::string_view word, BpeScratch& scratch, std::vector<int32_t>& ids) const {
  if (word.size() > BpeScratch::kKey) return merge(word, scratch, ids);
  BpeScratch::Slot& slot = scratch.slots_[hash(word) & (BpeScratch::kSlots - 1)];
  if (slot.length == word.size() && !std::memcmp(slot.key, word.data(), word.size())) {
    for (int i = 0; i < slot.count; ++i) ids.push_back(slot.ids[i]);
    return;
  }
  size_t before = ids.size();
  merge(word, scratch, ids);
  size_t count = ids.size() - before;
  if (count > BpeScratch::kIds) return;
  slot.length = static_cast<uint8_t>(word.size());
  slot.count = static_cast<uint8_t>(count);
  std::memcpy(slot.key, word.data(), word.size());
  std::copy(ids.end() - count, ids.end(), slot.ids);
}

void Bpe::merge(std::string_view word, BpeScratch& scratch, std::vector<int32_t>& ids) const {
  if (!words_.empty()) {
    auto whole = words_.find(std::string(word));
    if (whole != words_.end()) return ids.push_back(whole->second);
  }
  if (word.size() <= kShortWord) return merge_short(word, ids);
  merge_long(word, scratch, ids);
}

void Bpe::merge_short(std::string_view word, std::vector<int32_t>& ids) const {
  int32_t symbols[kShortWord];
  int32_t results[kShortWord];  // of merging a symbol with the next
  uint32_t ranks[kShortWord];
  int count = 0;
  for (unsigned char byte : word) {
    if (byte_ids_[byte] >= 0) symbols[count++] = byte_ids_[byte];
  }
  auto look = [&](int i) {
    const Entry* entry = i + 1 < count ? find(symbols[i], symbols[i + 1]) : nullptr;
    ranks[i] = entry ? entry->rank : kNever;
    results[i] = entry ? entry->id : 0;
  };
  for (int i = 0; i < count; ++i) look(i);
  while (count > 1) {
    int best = static_cast<int>(std::min_element(ranks, ranks + count) - ranks);
    if (ranks[best] == kNever) break;
    symbols[best] = results[best];
    --count;
    for (int i = best + 1; i < count; ++i) {
      symbols[i] = symbols[i + 1];
      ranks[i] = ranks[i + 1];
      results[i] = results[i + 1];
    }
    look(best);
    if (best > 0) look(best - 1);
  }
  ids.insert(ids.end(), symbols, symbols + count);
}

void Bpe::merge_long(std::string_view word, BpeScratch& scratch, std::vector<int32_t>& ids) const {
  auto& symbols = scratch.symbols_;
  auto& heap = scratch.heap_;
  symbols.clear();
  heap.clear();
  for (unsigned char byte : word) {
    if (byte_ids_[byte] < 0) continue;
    auto at = static_cast<int32_t>(symbols.size());
    symbols.push_back({byte_ids_[byte], at - 1, at + 1, true});
  }
  if (symbols.empty()) return;
  symbols.back().next = -1;

  auto later = [](const auto& a, const auto& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.at > b.at;
  };
  auto consider = [&](int32_t at) {
    if (at < 0 || symbols[at].next < 0) return false;
    const Entry* entry = find(symbols[at].id, symbols[symbols[at].next].id);
    if (entry) heap.push_back({entry->rank, at, entry->id});
    return entry != nullptr;
  };
  for (size_t i = 0; i < symbols.size(); ++i) consider(static_cast<int32_t>(i));
  std::make_heap(heap.begin(), heap.end(), later);

  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), later);
    auto top = heap.back();
    heap.pop_back();
    auto& left = symbols[top.at];
    if (!left.alive || left.next < 0) continue;
    auto& right = symbols[left.next];
    // The pair may have changed since it was queued. Symbols only grow, so a pair that merges to
    // the same token is the same pair.
    const Entry* entry = find(left.id, right.id);
    if (!entry || entry->id != top.id) continue;
    left.id = top.id;
    right.alive = false;
    left.next = right.next;
    if (right.next >= 0) symbols[right.next].previous = top.at;
    if (consider(left.previous)) std::push_heap(heap.begin(), heap.end(), later);
    if (consider(top.at)) std::push_heap(heap.begin(), heap.end(), later);
  }
  for (int32_t at = 0; at >= 0; at = symbols[at].next) ids.push_back(symbols[at].id);
}

}  // namespace fsdp::data
