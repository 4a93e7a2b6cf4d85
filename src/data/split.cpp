#include "data/split.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "base/format.h"
#include "base/table.h"
#include "data/order.h"
#include "fsdp/error.h"

namespace fsdp::data {
namespace {

constexpr int64_t kStretches = 64;
// Any constant works, as long as it never changes: places of stretches depend on it.
constexpr uint64_t kPlaceSeed = 0x9e3779b97f4a7c15ull;

// Where part `part` of `parts` equal parts of `total` begins.
int64_t cut(int64_t total, int64_t part, int64_t parts) {
  return total / parts * part + total % parts * part / parts;  // without overflow
}

void check_share(double share) {
  if (share >= 0 && share < 1) return;
  throw Error(formatted("a share of {:f} can't be held out for validation.", share),
              "pass a share from 0 to below 1; 0.01 is typical.");
}

}  // namespace

SampleSet::SampleSet(int64_t samples) {
  add(0, samples);
}

void SampleSet::add(int64_t first, int64_t count) {
  if (count <= 0) return;
  starts_.push_back(size() + count);
  first_.push_back(first);
}

int64_t SampleSet::operator[](int64_t i) const {
  auto range = std::upper_bound(starts_.begin(), starts_.end(), i) - starts_.begin();
  return first_[range] + i - (range > 0 ? starts_[range - 1] : 0);
}

Split split_samples(int64_t samples, double share) {
  check_share(share);
  if (share == 0) return {SampleSet(samples), SampleSet()};
  if (samples < 2) {
    throw Error(formatted("the data has {} samples, too few to hold one out for validation.",
                          with_separators(samples)),
                "use more data, shorter samples, or no validation.");
  }
  auto held =
      std::clamp<int64_t>(std::llround(share * static_cast<double>(samples)), 1, samples - 1);
  int64_t parts = std::min(held, kStretches);
  Split split;
  int64_t end = 0;  // of the stretch before
  for (int64_t part = 0; part < parts; ++part) {
    int64_t begin = cut(samples, part, parts), room = cut(samples, part + 1, parts) - begin;
    int64_t count = std::min(cut(held, part + 1, parts) - cut(held, part, parts), room);
    auto places = static_cast<uint64_t>(room - count + 1);
    int64_t first = begin + static_cast<int64_t>(mixed(kPlaceSeed + part) % places);
    split.training.add(end, first - end);
    split.validation.add(first, count);
    end = first + count;
  }
  split.training.add(end, samples - end);
  return split;
}

bool is_held_out(int64_t index, double share) {
  check_share(share);
  auto held_before = [&](int64_t documents) {
    return std::floor(static_cast<double>(documents) * share + 0.5);
  };
  return held_before(index + 1) > held_before(index);
}

}  // namespace fsdp::data
