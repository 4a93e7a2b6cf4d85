#include "data/folding.h"

#include <algorithm>

#include "base/format.h"
#include "data/unicode.h"

namespace fsdp::data {

Folding::Folding(const FoldingRun* runs, int run_count, const FoldingText* texts, int text_count) {
  for (int i = 0; i < run_count; ++i) {
    const FoldingRun& run = runs[i];
    for (char32_t code = run.first; code <= run.last; code += static_cast<char32_t>(run.step)) {
      std::string image;
      append_utf8(image, run.image + (code - run.first));
      images_.emplace_back(code, std::move(image));
    }
  }
  for (int i = 0; i < text_count; ++i) images_.emplace_back(texts[i].code, texts[i].text);
  std::sort(images_.begin(), images_.end());
}

const std::string* Folding::image(char32_t code) const {
  const auto found = std::lower_bound(images_.begin(), images_.end(), code,
                                      [](const auto& one, char32_t it) { return one.first < it; });
  return found == images_.end() || found->first != code ? nullptr : &found->second;
}

Folding Folding::lowercase() {
  return {kLowercaseRuns, kLowercaseRunsCount, kLowercaseTexts, kLowercaseTextsCount};
}

Folding Folding::compatible() {
  return {kCompatibleRuns, kCompatibleRunsCount, kCompatibleTexts, kCompatibleTextsCount};
}

bool Folding::apply(std::string_view text, std::string& out) const {
  size_t done = 0;  // of the text, in `out`
  bool changed = false;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    const std::string* folded = image(next_code(text, at));
    if (!folded) continue;
    changed = true;
    out.append(text.substr(done, begin - done)).append(*folded);
    done = at;
  }
  if (changed) out.append(text.substr(done));
  return changed;
}

std::string punctuation_class() {
  std::string pattern;
  for (int i = 0; i < kPunctuationRunsCount; ++i)
    pattern += formatted("\\x{{{:x}}}-\\x{{{:x}}}", uint64_t{kPunctuationRuns[i][0]},
                         uint64_t{kPunctuationRuns[i][1]});
  return pattern;
}

}  // namespace fsdp::data
