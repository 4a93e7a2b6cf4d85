// The algorithm of Unicode Standard Annex 15: decompose, order the marks, compose.
#include "data/nfc.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "data/unicode.h"

namespace fsdp::data {
namespace {

// Hangul syllables are computed: 19 leads, 21 vowels, 28 tails (the first means no tail).
constexpr char32_t kSyllable = 0xac00, kLead = 0x1100, kVowel = 0x1161, kTail = 0x11a7;
constexpr char32_t kLeads = 19, kVowels = 21, kTails = 28;
constexpr char32_t kSyllables = kLeads * kVowels * kTails;

uint64_t composition_key(char32_t first, char32_t second) {
  return uint64_t{first} << 32 | second;
}

struct Tables {
  std::unordered_map<char32_t, int> combining;
  std::unordered_map<char32_t, std::pair<char32_t, char32_t>> parts;
  std::unordered_map<uint64_t, char32_t> whole;
  std::vector<bool> active;  // characters that can change, or compose with the one before

  Tables() : active(0x110000) {
    for (int i = 0; i < kCombiningRunCount; ++i) {
      const CombiningRun& run = kCombiningRuns[i];
      for (char32_t code = run.first; code <= run.last; ++code) {
        combining[code] = run.combining_class;
        active[code] = true;
      }
    }
    std::unordered_set<char32_t> never(kNeverComposed, kNeverComposed + kNeverComposedCount);
    for (int i = 0; i < kPairCount; ++i) {
      auto [code, first, second] = std::to_array(kPairs[i]);
      parts[code] = {first, second};
      if (!never.contains(code)) whole[composition_key(first, second)] = code;
      active[second] = true;
      if (never.contains(code)) active[code] = true;
    }
    for (int i = 0; i < kSingleCount; ++i) {
      parts[kSingles[i][0]] = {kSingles[i][1], 0};
      active[kSingles[i][0]] = true;
    }
    for (char32_t i = 0; i < kVowels; ++i) active[kVowel + i] = true;
    for (char32_t i = 1; i < kTails; ++i) active[kTail + i] = true;
  }

  int class_of(char32_t code) const {
    auto at = combining.find(code);
    return at == combining.end() ? 0 : at->second;
  }
};

const Tables& tables() {
  static const Tables tables;
  return tables;
}

void take_apart(char32_t code, std::vector<char32_t>& out) {
  if (code >= kSyllable && code < kSyllable + kSyllables) {
    char32_t index = code - kSyllable;
    out.push_back(kLead + index / (kVowels * kTails));
    out.push_back(kVowel + index / kTails % kVowels);
    if (index % kTails) out.push_back(kTail + index % kTails);
    return;
  }
  auto at = tables().parts.find(code);
  if (at == tables().parts.end()) return out.push_back(code);
  take_apart(at->second.first, out);
  if (at->second.second) take_apart(at->second.second, out);
}

// 0 if the two don't compose.
char32_t composed(char32_t first, char32_t second) {
  if (first >= kLead && first < kLead + kLeads && second >= kVowel && second < kVowel + kVowels) {
    return kSyllable + ((first - kLead) * kVowels + (second - kVowel)) * kTails;
  }
  if (first >= kSyllable && first < kSyllable + kSyllables && (first - kSyllable) % kTails == 0 &&
      second > kTail && second < kTail + kTails) {
    return first + (second - kTail);
  }
  auto at = tables().whole.find(composition_key(first, second));
  return at == tables().whole.end() ? 0 : at->second;
}

// Sorts the marks between two starters by class; equal classes keep their order.
void order_marks(std::vector<std::pair<char32_t, int>>& codes) {
  for (size_t first = 0; first < codes.size();) {
    size_t last = first;
    while (last < codes.size() && codes[last].second) ++last;
    std::stable_sort(codes.begin() + first, codes.begin() + last,
                     [](const auto& a, const auto& b) { return a.second < b.second; });
    first = last + 1;
  }
}

}  // namespace

bool surely_nfc(std::string_view text) {
  const Tables& table = tables();
  for (size_t at = 0; at < text.size();) {
    if (static_cast<unsigned char>(text[at]) < 0x80) {
      ++at;
    } else if (table.active[next_code(text, at)]) {
      return false;
    }
  }
  return true;
}

std::string nfc(std::string_view text) {
  std::vector<std::pair<char32_t, int>> codes;
  codes.reserve(text.size());
  std::vector<char32_t> parts;
  for (size_t at = 0; at < text.size();) {
    parts.clear();
    take_apart(next_code(text, at), parts);
    for (char32_t part : parts) codes.emplace_back(part, tables().class_of(part));
  }
  order_marks(codes);

  std::string out;
  out.reserve(text.size());
  std::vector<char32_t> kept;  // a starter and the marks that didn't compose with it
  auto flush = [&] {
    for (char32_t code : kept) append_utf8(out, code);
    kept.clear();
  };
  int last_class = 0;  // of the last mark kept
  bool has_starter = false;
  for (auto [code, combining] : codes) {
    // Blocked if a mark of the same or a higher class, or another starter, is between the two.
    bool adjacent = kept.size() == 1;
    if (has_starter && (adjacent || last_class < combining)) {
      if (char32_t joined = composed(kept[0], code)) {
        kept[0] = joined;
        continue;
      }
    }
    if (combining == 0) {
      flush();
      has_starter = true;
    }
    kept.push_back(code);
    last_class = combining;
  }
  flush();
  return out;
}

}  // namespace fsdp::data
