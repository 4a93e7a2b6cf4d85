// Cutting a text into parts for threads.
#pragma once

#include <algorithm>
#include <string_view>
#include <vector>

#include "data/parallel.h"

namespace fsdp::data {

// Cuts `text` into parts of about `size` bytes, each before a byte that `can_cut` accepts.
template <class CanCut>
std::vector<std::string_view> parts_of(std::string_view text, size_t size, CanCut can_cut) {
  std::vector<std::string_view> parts;
  while (text.size() > size) {
    size_t at = size;
    while (at < text.size() && !can_cut(text[at])) ++at;
    parts.push_back(text.substr(0, at));
    text.remove_prefix(at);
  }
  parts.push_back(text);
  return parts;
}

// True if `good` holds for every part. Not std::vector<bool>: threads would write to the same byte.
template <class Good>
bool all_parts(const std::vector<std::string_view>& parts, int threads, Good good) {
  std::vector<char> results(parts.size());
  for_each_index(parts.size(), threads, [&](size_t i) { results[i] = good(parts[i]); });
  return std::find(results.begin(), results.end(), 0) == results.end();
}

}  // namespace fsdp::data
