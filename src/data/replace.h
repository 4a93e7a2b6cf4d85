// Replace: replaces what a pattern matches, or each occurrence of a text. A step of normalizers and
// of decoders.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "data/pattern.h"
#include "data/text_room.h"

namespace fsdp::data {

class Replace {
 public:
  // `where`: the file and the part of it, for errors.
  Replace(std::variant<Pattern, std::string> what, std::string by, std::string where)
      : what_(std::move(what)), by_(std::move(by)), where_(std::move(where)) {}

  // Appends the new text to `out`; returns false and appends nothing if it is `text`.
  bool apply(std::string_view text, PatternBudget& budget, TextRoom& room, std::string& out) const;
  // Whether the first character may come from another place than the beginning.
  bool moves_begin() const;

 private:
  std::pair<size_t, size_t> find(std::string_view text, size_t from, PatternBudget& budget) const;

  std::variant<Pattern, std::string> what_;
  std::string by_, where_;
};

}  // namespace fsdp::data
