// Few symbols are merged in an array, in O(n²) without allocation; many with a heap, in
// O(n log n). Both merge the pair with the lowest rank first and, of equal ranks, the leftmost.
#include "data/bpe.h"

#include <algorithm>

#include "data/word_cache.h"

namespace fsdp::data {
namespace {

constexpr size_t kFew = 40;  // symbols
constexpr uint32_t kNever = UINT32_MAX;

uint64_t merge_key(int32_t left, int32_t right) {
  return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
}

}  // namespace

class Bpe::Memory : public Model::Scratch {
 public:
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

  WordCache cache;
  std::vector<int32_t> spelled;
  std::vector<Symbol> symbols;
  std::vector<Candidate> heap;
};

Bpe::Bpe(std::unique_ptr<const Spelling> spelling, const std::vector<Merge>& merges,
         std::unordered_map<std::string, int32_t> words)
    : spelling_(std::move(spelling)), words_(std::move(words)) {
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

std::unique_ptr<Model::Scratch> Bpe::scratch() const {
  return std::make_unique<Memory>();
}

const Bpe::Entry* Bpe::find(int32_t left, int32_t right) const {
  uint64_t pair = merge_key(left, right);
  for (uint64_t at = mix(pair) & mask_;; at = (at + 1) & mask_) {
    if (table_[at].pair == pair) return &table_[at];
    if (table_[at].pair == UINT64_MAX) return nullptr;
  }
}

void Bpe::encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const {
  auto& memory = static_cast<Memory&>(scratch);
  memory.cache.encode(word, ids, [&] { merge(word, memory, ids); });
}

void Bpe::merge(std::string_view word, Memory& memory, std::vector<int32_t>& ids) const {
  if (!words_.empty()) {
    auto whole = words_.find(std::string(word));
    if (whole != words_.end()) return ids.push_back(whole->second);
  }
  memory.spelled.clear();
  spelling_->spell(word, memory.spelled);
  if (memory.spelled.size() <= kFew) return merge_few(memory.spelled, ids);
  merge_many(memory, ids);
}

void Bpe::merge_few(std::vector<int32_t>& spelled, std::vector<int32_t>& ids) const {
  int32_t* symbols = spelled.data();
  int32_t results[kFew];  // of merging a symbol with the next
  uint32_t ranks[kFew];
  int count = static_cast<int>(spelled.size());
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

void Bpe::merge_many(Memory& memory, std::vector<int32_t>& ids) const {
  auto& symbols = memory.symbols;
  auto& heap = memory.heap;
  symbols.clear();
  heap.clear();
  for (int32_t id : memory.spelled) {
    auto at = static_cast<int32_t>(symbols.size());
    symbols.push_back({id, at - 1, at + 1, true});
  }
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
