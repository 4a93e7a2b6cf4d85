// Matching: plain backtracking over a graph in which every node knows its successor. The length of
// the pattern bounds the depth, because only single characters are repeated.
#include "data/pattern.h"

#include <bit>

#include "data/unicode.h"
#include "fsdp/error.h"

namespace fsdp::data {

bool CharacterSet::has(char32_t code) const {
  if (code < 256) return low[code];
  bool found = categories & bit(category(code));
  for (auto [first, last] : ranges) found = found || (code >= first && code <= last);
  return found != negated;
}

// Moves `at` past as many characters of the node's set as it may take, and returns how many.
inline uint32_t Pattern::take(const Node& node, std::string_view text, size_t& at) const {
  const CharacterSet& set = sets_[node.set];
  uint32_t count = 0;
  for (; count < node.max && at < text.size(); ++count) {
    auto byte = static_cast<unsigned char>(text[at]);
    if (byte < 0x80) {
      if (!set.low[byte]) break;
      ++at;
    } else {
      size_t after = at;
      if (!set.has(next_code(text, after))) break;
      at = after;
    }
  }
  return count;
}

size_t Pattern::match(int index, std::string_view text, size_t at, int64_t& tries) const {
  if (--tries < 0) {
    throw Error("a pattern of the tokenizer takes too long on this text.",
                "the tokenizer.json is damaged or malicious; download it again from its source.");
  }
  while (true) {
    const Node& node = nodes_[index];
    switch (node.kind) {
      case Node::kAccept:
        return at;
      case Node::kSet: {
        uint32_t count = take(node, text, at);
        if (count < node.min) return kNone;
        if (!node.gives_back) break;
        for (; count > node.min; --count) {
          size_t end = match(node.next, text, at, tries);
          if (end != kNone) return end;
          do {
            --at;
          } while (continues(text[at]));
        }
        break;
      }
      case Node::kLook:
        if ((match(node.inner, text, at, tries) == kNone) != node.negative) return kNone;
        break;
      case Node::kEither: {
        auto open =
            at < text.size() ? node.candidates[static_cast<unsigned char>(text[at])] : node.all;
        if (!open) return kNone;
        for (; open & (open - 1); open &= open - 1) {
          size_t end = match(node.branches[std::countr_zero(open)], text, at, tries);
          if (end != kNone) return end;
        }
        index = node.branches[std::countr_zero(open)];
        continue;
      }
    }
    index = node.next;
  }
}

std::pair<size_t, size_t> Pattern::find(std::string_view text, size_t from) const {
  // Real patterns need a few tries per character.
  int64_t tries = 200'000 + 100 * static_cast<int64_t>(text.size() - from);
  for (size_t at = from; at < text.size();) {
    size_t end = match(start_, text, at, tries);
    if (end != kNone && end > at) return {at, end};
    do {
      ++at;
    } while (at < text.size() && continues(text[at]));
  }
  return {kNone, kNone};
}

int Pattern::add(Node node) {
  switch (node.kind) {
    case Node::kAccept:
      node.first.set();
      node.empty = true;
      break;
    case Node::kLook:
      node.first = nodes_[node.next].first;
      node.empty = nodes_[node.next].empty;
      break;
    case Node::kEither:
      for (size_t i = 0; i < node.branches.size(); ++i) {
        const Node& branch = nodes_[node.branches[i]];
        node.first |= branch.first;
        node.empty = node.empty || branch.empty;
        node.all |= uint32_t{1} << i;
        for (int byte = 0; byte < 256; ++byte) {
          node.candidates[byte] |= uint32_t{branch.first[byte]} << i;
        }
      }
      break;
    case Node::kSet: {
      node.gives_back =
          !node.possessive && node.min != node.max && nodes_[node.next].kind != Node::kAccept;
      const CharacterSet& set = sets_[node.set];
      bool beyond = set.categories || !set.ranges.empty() || set.negated;
      for (int i = 128; i < 256; ++i) beyond = beyond || set.low[i];
      for (int i = 0; i < 256; ++i) node.first[i] = i < 128 ? set.low[i] : beyond;
      if (node.min > 0) break;
      node.first |= nodes_[node.next].first;
      node.empty = nodes_[node.next].empty;
      break;
    }
  }
  nodes_.push_back(std::move(node));
  return static_cast<int>(nodes_.size()) - 1;
}

}  // namespace fsdp::data
