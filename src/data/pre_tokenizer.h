// Pre-tokenizers: the steps that split a text into words. Each step is applied to every piece that
// the step before made: it may rewrite the piece, and then may split it.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/pattern.h"

namespace fsdp::data {

// What becomes of a pattern's matches and of the text between them.
enum class Cut {
  kIsolated,     // each is a piece
  kDropMatches,  // the text between is
  kKeepMatches,  // the matches are
  kBefore,       // a piece ends before each match
  kAfter,        // a piece ends behind each match
  kRuns,         // matches without text between them are one piece
};

class Splitter {
 public:
  struct Piece {
    size_t begin = 0, end = 0;
    bool empty() const { return begin == end; }
  };
  struct Step {
    Piece first, second;       // those that aren't empty
    size_t end = 0;            // where the next step begins
    bool reached_end = false;  // looked beyond the text: with more text, this might differ
  };

  Splitter(Pattern pattern, Cut cut) : pattern_(std::move(pattern)), cut_(cut) {}
  // The next pieces, from `from` on. The result depends only on `text` and `from`, which parallel
  // scanning relies on.
  Step next(std::string_view text, size_t from, PatternBudget& budget) const {
    auto [begin, end, reached_end] = pattern_.find(text, from, budget);
    if (begin == Pattern::kNone) begin = end = text.size();
    Step step{{from, begin}, {begin, end}, end, reached_end};
    if (cut_ != Cut::kIsolated) regroup(text, step, budget);
    return step;
  }

 private:
  // Makes the pieces of another cut from those of kIsolated.
  void regroup(std::string_view text, Step& step, PatternBudget& budget) const;

  Pattern pattern_;
  Cut cut_;
};

class Rewriter {
 public:
  virtual ~Rewriter() = default;
  // Writes the new piece, not shorter, to `out`, which is empty; or returns false, if it stays as
  // it is.
  // `first`: it begins where the text that is encoded begins.
  virtual bool rewrite(std::string_view piece, bool first, std::string& out) const = 0;
};

enum class PrependScheme { kAlways, kFirst, kNever };

// Prepends a space to a piece that doesn't begin with one.
std::shared_ptr<const Rewriter> space_in_front();
// Spells spaces as `replacement`, and begins pieces with it.
std::shared_ptr<const Rewriter> metaspace(std::string replacement, PrependScheme scheme);

struct WordStep {
  std::shared_ptr<const Rewriter> rewriter;  // or null
  std::shared_ptr<const Splitter> splitter;  // or null
};

}  // namespace fsdp::data
