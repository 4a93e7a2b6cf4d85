// Viterbi's algorithm: from left to right, the best way to reach each character. A character that
// is no token may be taken as unknown, with a score below all others; neighbours that were are one
// unknown text.
#include "data/unigram.h"

#include <algorithm>
#include <limits>
#include <unordered_map>

#include "data/spelling.h"
#include "data/unicode.h"
#include "data/word_cache.h"

namespace fsdp::data {
namespace {

constexpr double kUnknownPenalty = 10;  // below the lowest score, as in the `tokenizers` package

}  // namespace

class Unigram::Memory : public Model::Scratch {
 public:
  struct Reached {  // a position in the word
    double score = 0;
    size_t from = kNowhere;
    int32_t id = 0;
  };
  static constexpr size_t kNowhere = SIZE_MAX;

  WordCache cache;
  std::vector<Reached> reached;
  std::vector<size_t> ends;  // of tokens, from the last to the first
};

Unigram::Unigram(const std::vector<std::pair<std::string, double>>& vocabulary, int32_t unknown,
                 bool byte_fallback)
    : tokens_(1, -1), unknown_(unknown), byte_fallback_(byte_fallback) {
  size_t bytes = 0, size = 16;
  for (const auto& [token, score] : vocabulary) bytes += token.size();
  while (size < bytes * 2) size *= 2;
  edges_.resize(size);
  double lowest = std::numeric_limits<double>::infinity();
  std::unordered_map<std::string, int32_t> ids;
  for (const auto& [token, score] : vocabulary) {
    const auto id = static_cast<int32_t>(scores_.size());
    scores_.push_back(score);
    lowest = std::min(lowest, score);
    add(token, id);
    if (byte_of_token(token) >= 0) ids.emplace(token, id);
  }
  unknown_score_ = lowest - kUnknownPenalty;
  bytes_ = byte_tokens(ids);
}

int32_t Unigram::follow(int32_t node, unsigned char byte) const {
  const uint64_t from = static_cast<uint64_t>(node) << 8 | byte, mask = edges_.size() - 1;
  for (uint64_t at = mix(from) & mask;; at = (at + 1) & mask) {
    if (edges_[at].from == from) return edges_[at].to;
    if (edges_[at].from == UINT64_MAX) return -1;
  }
}

void Unigram::add(std::string_view token, int32_t id) {
  if (token.empty()) return;
  int32_t node = 0;
  for (unsigned char byte : token) {
    const uint64_t from = static_cast<uint64_t>(node) << 8 | byte, mask = edges_.size() - 1;
    uint64_t at = mix(from) & mask;
    while (edges_[at].from != UINT64_MAX && edges_[at].from != from) at = (at + 1) & mask;
    if (edges_[at].from == UINT64_MAX) {
      edges_[at] = {from, static_cast<int32_t>(tokens_.size())};
      tokens_.push_back(-1);
    }
    node = edges_[at].to;
  }
  tokens_[node] = id;
}

int32_t Unigram::find(std::string_view token) const {
  int32_t node = 0;
  for (unsigned char byte : token) {
    if ((node = follow(node, byte)) < 0) return -1;
  }
  return tokens_[node];
}

std::unique_ptr<Model::Scratch> Unigram::scratch() const {
  return std::make_unique<Memory>();
}

void Unigram::encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const {
  auto& memory = static_cast<Memory&>(scratch);
  memory.cache.encode(word, ids, [&] {
    search(word, memory);
    collect(word, memory, ids);
  });
}

void Unigram::search(std::string_view word, Memory& memory) const {
  auto& reached = memory.reached;
  reached.assign(word.size() + 1, {});
  for (size_t begin = 0; begin < word.size();) {
    const auto reach = [&](size_t end, double score, int32_t id) {
      score += reached[begin].score;
      if (reached[end].from == Memory::kNowhere || score > reached[end].score)
        reached[end] = {score, begin, id};
    };
    size_t next = begin;
    next_code(word, next);
    bool alone = false;  // the character is a token
    int32_t node = 0;
    for (size_t at = begin; at < word.size(); ++at) {
      node = follow(node, static_cast<unsigned char>(word[at]));
      if (node < 0) break;
      if (tokens_[node] < 0) continue;
      reach(at + 1, scores_[tokens_[node]], tokens_[node]);
      alone = alone || at + 1 == next;
    }
    if (!alone) reach(next, unknown_score_, unknown_);
    begin = next;
  }
}

void Unigram::collect(std::string_view word, Memory& memory, std::vector<int32_t>& ids) const {
  auto& ends = memory.ends;
  ends.clear();
  for (size_t at = word.size(); at > 0; at = memory.reached[at].from) ends.push_back(at);
  size_t begin = 0, unknown = 0;  // where a token and an unknown text begin
  for (auto end = ends.rbegin(); end != ends.rend(); begin = *end++) {
    const int32_t id = memory.reached[*end].id;
    if (id == unknown_) continue;
    if (unknown < begin) append_unknown(word.substr(unknown, begin - unknown), ids);
    ids.push_back(id);
    unknown = *end;
  }
  if (unknown < word.size()) append_unknown(word.substr(unknown), ids);
}

void Unigram::append_unknown(std::string_view text, std::vector<int32_t>& ids) const {
  const int32_t whole = find(text);  // a token whose score is too low for each part to use it
  if (whole >= 0) return ids.push_back(whole);
  const bool spelled = byte_fallback_ && std::all_of(text.begin(), text.end(), [&](char c) {
                         return bytes_[static_cast<unsigned char>(c)] >= 0;
                       });
  if (!spelled) return ids.push_back(unknown_);
  for (unsigned char byte : text) ids.push_back(bytes_[byte]);
}

}  // namespace fsdp::data
