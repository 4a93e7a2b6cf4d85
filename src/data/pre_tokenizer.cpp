#include "data/pre_tokenizer.h"

#include <algorithm>

namespace fsdp::data {
namespace {

class SpaceInFront : public Rewriter {
 public:
  bool rewrite(std::string_view piece, bool, std::string& out) const override {
    if (piece.starts_with(' ')) return false;
    out.append(" ").append(piece);
    return true;
  }
};

class Metaspace : public Rewriter {
 public:
  Metaspace(std::string replacement, PrependScheme scheme)
      : replacement_(std::move(replacement)), scheme_(scheme) {}

  bool rewrite(std::string_view piece, bool first, std::string& out) const override {
    const bool begins = piece.starts_with(' ') || piece.starts_with(replacement_);
    if (!begins &&
        (scheme_ == PrependScheme::kAlways || (scheme_ == PrependScheme::kFirst && first)))
      out.append(replacement_);
    for (size_t at = 0; at < piece.size();) {
      const size_t space = std::min(piece.find(' ', at), piece.size());
      out.append(piece.substr(at, space - at));
      if (space < piece.size()) out.append(replacement_);
      at = space + 1;
    }
    return true;
  }

 private:
  std::string replacement_;
  PrependScheme scheme_;
};

}  // namespace

void Splitter::regroup(std::string_view text, Step& step, PatternBudget& budget) const {
  const auto next_match = [&] {  // from the step's end on
    const auto match = pattern_.find(text, step.end, budget);
    step.reached_end = step.reached_end || match.reached_end;
    return match.begin == Pattern::kNone ? Piece{text.size(), text.size()}
                                         : Piece{match.begin, match.end};
  };
  Piece &between = step.first, &match = step.second;
  switch (cut_) {
    case Cut::kIsolated:
      break;
    case Cut::kDropMatches:
      match = {};
      break;
    case Cut::kKeepMatches:
      between = {};
      break;
    case Cut::kAfter:
      between.end = match.end;
      match = {};
      break;
    case Cut::kBefore:
      if (between.empty()) {
        between.end = next_match().begin;
        step.end = between.end;
      } else {
        step.end = between.end;
      }
      match = {};
      break;
    case Cut::kRuns:
      for (Piece more = next_match(); more.begin == step.end && !more.empty(); more = next_match())
        match.end = step.end = more.end;
      break;
  }
}

std::shared_ptr<const Rewriter> space_in_front() {
  return std::make_shared<SpaceInFront>();
}

std::shared_ptr<const Rewriter> metaspace(std::string replacement, PrependScheme scheme) {
  return std::make_shared<Metaspace>(std::move(replacement), scheme);
}

}  // namespace fsdp::data
