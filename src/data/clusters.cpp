#include "data/clusters.h"

#include <algorithm>

#include "data/unicode.h"

namespace fsdp::data {
namespace {

using enum ClusterKind;

constexpr char32_t kJoiner = 0x200D;

// Hangul letters, and syllables of two and three of them.
enum class Hangul { kNone, kLeading, kVowel, kTrailing, kTwo, kThree };

Hangul hangul_of(char32_t code) {
  const auto within = [&](char32_t first, char32_t last) { return code >= first && code <= last; };
  if (code < 0x1100 || code > 0xD7FB) return Hangul::kNone;
  if (within(0x1100, 0x115F) || within(0xA960, 0xA97C)) return Hangul::kLeading;
  if (within(0x1160, 0x11A7) || within(0xD7B0, 0xD7C6)) return Hangul::kVowel;
  if (within(0x11A8, 0x11FF) || within(0xD7CB, 0xD7FB)) return Hangul::kTrailing;
  if (!within(0xAC00, 0xD7A3)) return Hangul::kNone;
  return (code - 0xAC00) % 28 == 0 ? Hangul::kTwo : Hangul::kThree;
}

bool makes_syllable(Hangul before, Hangul next) {
  using enum Hangul;
  if (next == kNone) return false;
  if (before == kLeading) return next != kTrailing;
  if (before == kVowel || before == kTwo) return next == kVowel || next == kTrailing;
  return (before == kTrailing || before == kThree) && next == kTrailing;
}

bool is_flag_letter(char32_t code) {
  return code >= 0x1F1E6 && code <= 0x1F1FF;
}

ClusterKind kind_of(char32_t code) {
  const auto after = [](char32_t of, uint32_t run) { return of < run >> 4; };
  const uint32_t* end = kClusterRuns + kClusterRunCount;
  return static_cast<ClusterKind>(std::upper_bound(kClusterRuns, end, code, after)[-1] & 15);
}

bool extends(ClusterKind kind) {
  return kind == kExtend || kind == kConjunctExtend || kind == kLinker;
}

// What the beginning of a cluster says about the character after it.
class Cluster {
 public:
  explicit Cluster(char32_t first) { add(first, kind_of(first)); }

  // Takes the next character if it belongs to the cluster.
  bool take(char32_t next) {
    const ClusterKind kind = kind_of(next);
    if (!joins(next, kind)) return false;
    add(next, kind);
    return true;
  }

 private:
  bool joins(char32_t next, ClusterKind kind) const {
    if (last_ == '\r' && next == '\n') return true;
    if (last_kind_ == kControl || kind == kControl) return false;
    if (extends(kind) || kind == kSpacing || last_kind_ == kPrepend) return true;
    return makes_syllable(hangul_of(last_), hangul_of(next)) || (linked_ && kind == kConsonant) ||
           (joined_ && kind == kPictograph) || (flag_letters_ % 2 == 1 && is_flag_letter(next));
  }

  void add(char32_t code, ClusterKind kind) {
    // Pictograph, extenders, joiner.
    joined_ = pictured_ && code == kJoiner;
    pictured_ = kind == kPictograph || (pictured_ && extends(kind));
    // Consonant, then linkers and extenders with at least one linker.
    const bool goes_on = spelled_ && (kind == kLinker || kind == kConjunctExtend);
    linked_ = goes_on && (linked_ || kind == kLinker);
    spelled_ = kind == kConsonant || goes_on;
    flag_letters_ = is_flag_letter(code) ? flag_letters_ + 1 : 0;
    last_ = code;
    last_kind_ = kind;
  }

  char32_t last_ = 0;
  ClusterKind last_kind_ = kOther;
  bool pictured_ = false, joined_ = false, spelled_ = false, linked_ = false;
  int flag_letters_ = 0;
};

}  // namespace

size_t cluster_end(std::string_view text, size_t begin) {
  size_t at = begin;
  Cluster cluster(next_code(text, at));
  while (at < text.size()) {
    size_t after = at;
    if (!cluster.take(next_code(text, after))) break;
    at = after;
  }
  return at;
}

}  // namespace fsdp::data
