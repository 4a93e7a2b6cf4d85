#include "data/replace.h"

#include <tuple>

#include "data/unicode.h"

namespace fsdp::data {

std::pair<size_t, size_t> Replace::find(std::string_view text, size_t from,
                                        PatternBudget& budget) const {
  if (const auto* pattern = std::get_if<Pattern>(&what_)) {
    const auto match = pattern->find(text, from, budget);
    return {match.begin, match.end};
  }
  const auto& wanted = std::get<std::string>(what_);
  const size_t begin = text.find(wanted, from);
  return {begin, begin + wanted.size()};
}

bool Replace::apply(std::string_view text, PatternBudget& budget, TextRoom& room,
                    std::string& out) const {
  size_t at = 0;
  for (auto [begin, end] = find(text, 0, budget); begin != Pattern::kNone;
       std::tie(begin, end) = find(text, at, budget)) {
    room.take(begin - at + by_.size(), where_);
    out.append(text.substr(at, begin - at)).append(by_);
    at = end;
  }
  if (at == 0) return false;
  room.take(text.size() - at, where_);
  out.append(text.substr(at));
  return true;
}

bool Replace::moves_begin() const {
  const auto* wanted = std::get_if<std::string>(&what_);
  return by_.empty() || !wanted || utf8_step(*wanted, 0).length != static_cast<int>(wanted->size());
}

}  // namespace fsdp::data
