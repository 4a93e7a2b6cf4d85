// Matching: plain backtracking over a graph in which every node knows its successor. The length of
// the pattern bounds the depth, because only single characters are repeated.
#include "data/pattern.h"

#include <bit>

#include "base/format.h"
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
inline uint32_t Pattern::take(const Node& node, Scan& scan, size_t& at) const {
  const CharacterSet& set = sets_[node.set];
  const std::string_view text = scan.text;
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
  scan.left -= count;
  scan.reached_end = scan.reached_end || (at == text.size() && count < node.max);
  return count;
}

size_t Pattern::match(int index, Scan& scan, size_t at) const {
  const std::string_view text = scan.text;
  while (true) {
    if (--scan.left < 0) {
      throw Error(formatted("{}: the pattern {} looks at each byte of a text more than {} times.",
                            where_, expression_, PatternBudget::kLooksPerByte),
                  "the tokenizer.json is damaged or malicious; download it again from its source.");
    }
    const Node& node = nodes_[index];
    switch (node.kind) {
      case Node::kAccept:
        return at;
      case Node::kSet: {
        uint32_t count = take(node, scan, at);
        if (count < node.min) return kNone;
        if (!node.gives_back) break;
        for (; count > node.min; --count) {
          size_t end = match(node.next, scan, at);
          if (end != kNone) return end;
          do {
            --at;
          } while (continues(text[at]));
        }
        break;
      }
      case Node::kLook:
        if ((match(node.inner, scan, at) == kNone) != node.negative) return kNone;
        break;
      case Node::kEither: {
        const bool ended = at == text.size();
        scan.reached_end = scan.reached_end || ended;
        auto open = ended ? node.all : node.candidates[static_cast<unsigned char>(text[at])];
        if (!open) return kNone;
        for (; open & (open - 1); open &= open - 1) {
          size_t end = match(node.branches[std::countr_zero(open)], scan, at);
          if (end != kNone) return end;
        }
        index = node.branches[std::countr_zero(open)];
        continue;
      }
    }
    index = node.next;
  }
}

Pattern::Match Pattern::find(std::string_view text, size_t from, PatternBudget& budget) const {
  Scan scan{text, budget.left_};
  for (size_t at = from; at < text.size();) {
    size_t end = match(start_, scan, at);
    if (end != kNone && end > at) return {at, end, scan.reached_end};
    do {
      ++at;
    } while (at < text.size() && continues(text[at]));
  }
  return {kNone, kNone, true};
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
