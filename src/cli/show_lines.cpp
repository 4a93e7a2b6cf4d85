#include "cli/show_lines.h"

#include <algorithm>

#include "base/format.h"
#include "base/log.h"
#include "base/printable.h"
#include "base/table.h"
#include "base/terminal.h"
#include "data/unicode.h"

namespace fsdp::cli {
namespace {

struct Enough {};  // ends the reading of a file

std::string painted(const std::string& text, bool counts) {
  if (!counts) return printable(text);
  if (!has_colour(STDOUT)) return "[[" + printable(text) + "]]";
  std::string out;
  for (size_t at = 0; at <= text.size();) {  // line by line: pagers end a colour with its line
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string line = printable(text.substr(at, end - at));
    if (!line.empty()) out += paint(STDOUT, "32", line);
    if (end < text.size()) out += "\n";
    at = end + 1;
  }
  return out;
}

std::string shown(const data::JsonlDocument& document, const data::Tokenizer& tokenizer) {
  std::string out;
  for (size_t from = 0; from < document.ids.size();) {
    size_t to = from;
    while (to < document.ids.size() && document.counts[to] == document.counts[from]) ++to;
    const std::vector<int32_t> ids(document.ids.begin() + static_cast<ptrdiff_t>(from),
                                   document.ids.begin() + static_cast<ptrdiff_t>(to));
    out += painted(data::repaired(tokenizer.decode(ids)), document.counts[from] != 0);
    from = to;
  }
  return out;
}

}  // namespace

int64_t show_lines(const std::string& path, const data::Tokenizer& tokenizer,
                   const data::JsonlOptions& options, int64_t most, std::ostream& out) {
  int64_t count = 0;
  try {
    const auto skipped =
        data::tokenise_jsonl(path, tokenizer, options, [&](data::JsonlDocument&& document) {
          if (count == most) throw Enough{};
          ++count;
          const auto counted = std::count(document.counts.begin(), document.counts.end(), 1);
          out << formatted("--- {}: line {}: {} tokens, {} trained on ---\n", path, document.line,
                           with_separators(static_cast<int64_t>(document.ids.size())),
                           with_separators(static_cast<int64_t>(counted)))
              << shown(document, tokenizer) << "\n";
        });
    say_skipped(path, skipped);
  } catch (const Enough&) {
  }
  return count;
}

void say_skipped(const std::string& path, const data::SkippedLines& skipped) {
  if (skipped.count > 0)
    log::warn(formatted("skipped {} bad lines of {}; the first: {}.",
                        with_separators(skipped.count), path, skipped.first));
}

}  // namespace fsdp::cli
