#include "base/refusals.h"

#include <algorithm>

#include "base/format.h"
#include "base/log.h"

namespace fsdp::base {

using std::chrono::steady_clock;

constexpr int kAtOnce = 5;
constexpr size_t kDifferent = 3;
constexpr std::chrono::minutes kPause{1};

void Refusals::add(const std::string& peer, const std::string& why) {
  const std::string text = formatted("{} {}", peer, why);
  if (different_.size() < kDifferent &&
      std::find(different_.begin(), different_.end(), text) == different_.end())
    different_.push_back(text);
  const auto now = steady_clock::now();
  if (said_ >= kAtOnce && now - last_ < kPause) {
    ++unsaid_;
    return;
  }
  const std::string others =
      unsaid_ > 0 ? formatted(" ({} more since the last line)", unsaid_) : "";
  log::warn(formatted("refused {}: {}{}.", what_, text, others));
  ++said_;
  unsaid_ = 0;
  last_ = now;
}

std::string Refusals::summary() const {
  std::string all;
  for (const auto& text : different_) all += (all.empty() ? "" : "; ") + text;
  return all;
}

}  // namespace fsdp::base
