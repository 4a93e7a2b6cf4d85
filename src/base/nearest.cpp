#include "base/nearest.h"

#include <algorithm>

namespace fsdp::base {

size_t edits(const std::string& from, const std::string& to) {
  std::vector<std::vector<size_t>> cost(from.size() + 1, std::vector<size_t>(to.size() + 1));
  for (size_t i = 0; i <= from.size(); ++i) {
    for (size_t j = 0; j <= to.size(); ++j) {
      if (i == 0 || j == 0) {
        cost[i][j] = i + j;
        continue;
      }
      bool same = from[i - 1] == to[j - 1];
      cost[i][j] = std::min({cost[i - 1][j] + 1, cost[i][j - 1] + 1, cost[i - 1][j - 1] + !same});
      if (i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1]) {
        cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
      }
    }
  }
  return cost[from.size()][to.size()];
}

size_t likely_typo(const std::string& word) {
  return 1 + word.size() / 3;
}

std::string nearest_word(const std::vector<std::string>& known, const std::string& word) {
  std::string best;
  size_t least = likely_typo(word) + 1;
  for (const std::string& candidate : known) {
    size_t cost = edits(word, candidate);
    if (cost < least) least = cost, best = candidate;
  }
  return best;
}

}  // namespace fsdp::base
