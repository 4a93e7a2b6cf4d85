// Threads collect candidate matches, each in its own part of the text. One pass over the few
// candidates then takes them from left to right.
#include "data/added_tokens.h"

#include <algorithm>
#include <cstring>

#include "data/parallel.h"
#include "data/unicode.h"

namespace fsdp::data {
namespace {

constexpr size_t kChunk = size_t{1} << 20;

// The character before text[at]; at > 0.
char32_t code_before(std::string_view text, size_t& at) {
  do {
    --at;
  } while (continues(text[at]));
  size_t behind = at;
  return next_code(text, behind);
}

bool stands_alone(std::string_view text, size_t begin, size_t end) {
  if (end < text.size() && is_word(next_code(text, end))) return false;
  return begin == 0 || !is_word(code_before(text, begin));
}

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)), trie_(1) {
  for (size_t i = 0; i < tokens_.size(); ++i) {
    int at = 0;
    for (unsigned char byte : tokens_[i].content) {
      auto& next = trie_[at].next;
      auto found = std::find_if(next.begin(), next.end(), [&](auto& n) { return n.first == byte; });
      if (found != next.end()) {
        at = found->second;
      } else {
        int fresh = static_cast<int>(trie_.size());
        next.emplace_back(byte, fresh);
        trie_.emplace_back();
        at = fresh;
      }
    }
    trie_[at].token = static_cast<int>(i);
    starts_.set(static_cast<unsigned char>(tokens_[i].content[0]));
  }
  for (int byte = 0; byte < 256 && starts_.count() == 1; ++byte) {
    if (starts_[byte]) only_start_ = byte;
  }
}

void AddedTokens::look(std::string_view text, size_t from, size_t to,
                       std::vector<Candidate>& found) const {
  for (size_t begin = from; begin < to; ++begin) {
    if (only_start_ >= 0) {
      const void* hit = std::memchr(text.data() + begin, only_start_, to - begin);
      if (!hit) return;
      begin = static_cast<const char*>(hit) - text.data();
    } else if (!starts_[static_cast<unsigned char>(text[begin])]) {
      continue;
    }
    int node = 0;
    Candidate best{begin, 0, -1};
    for (size_t at = begin; at < text.size(); ++at) {
      int next = -1;
      for (auto [byte, child] : trie_[node].next) {
        if (byte == static_cast<unsigned char>(text[at])) next = child;
      }
      if (next < 0) break;
      node = next;
      if (trie_[node].token >= 0) best.end = at + 1, best.token = trie_[node].token;
    }
    if (best.token >= 0) found.push_back(best);
  }
}

std::vector<AddedTokens::Found> AddedTokens::find(std::string_view text, int threads) const {
  std::vector<Found> result;
  if (empty()) return result;
  std::vector<std::vector<Candidate>> parts((text.size() + kChunk - 1) / kChunk);
  for_each_index(parts.size(), threads, [&](size_t i) {
    look(text, i * kChunk, std::min(text.size(), (i + 1) * kChunk), parts[i]);
  });
  size_t match_end = 0;               // of the last candidate considered, without white space
  size_t spaces = 0, spaces_end = 0;  // white space that was looked at behind a token
  for (const auto& part : parts) {
    for (const Candidate& candidate : part) {
      if (candidate.begin < match_end) continue;
      match_end = candidate.end;
      const AddedToken& token = tokens_[candidate.token];
      size_t begin = candidate.begin, end = candidate.end;
      if (token.single_word && !stands_alone(text, begin, end)) continue;
      // White space that the token before has taken isn't looked at again: tokens may be white
      // space.
      const size_t taken = result.empty() ? 0 : result.back().end;
      if (token.lstrip) {
        for (size_t at = begin; at > taken && is_space(code_before(text, at));) begin = at;
      }
      if (token.rstrip && end >= spaces && end < spaces_end) {
        end = spaces_end;
      } else if (token.rstrip) {
        spaces = end;
        for (size_t at = end; at < text.size() && is_space(next_code(text, at));) end = at;
        spaces_end = end;
      }
      result.push_back({begin, end, token.id});
    }
  }
  return result;
}

}  // namespace fsdp::data
