#include "shard/layout.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace fsdp::shard {
namespace {

constexpr double kPaddingForRows = 0.009;  // the most AUTO spends on cuts between rows

// The first cut after `position`.
int64_t next_cut(int64_t position, int64_t shard) {
  return (position / shard + 1) * shard;
}

// Whether all cuts of a parameter at offset `at` fall between rows.
bool cuts_on_rows(int64_t at, const Extent& p, int64_t shard) {
  int64_t first = next_cut(at, shard);
  if (first >= at + p.numel) return true;
  bool one = first + shard >= at + p.numel;
  return (first - at) % p.row == 0 && (one || shard % p.row == 0);
}

}  // namespace

Layout::Layout(std::vector<Extent> parameters, int world, Cut cut, int64_t blocks)
    : parameters_(std::move(parameters)),
      world_(world),
      cut_(cut),
      blocks_(blocks > 0),
      align_(std::max(kAlign, blocks)) {
  for (const Extent& p : parameters_) used_ += p.numel;
  constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();
  if (cut != Cut::AUTO) {
    shard_ = search(cut, kNoLimit, offsets_);
    return;
  }
  std::vector<int64_t> inside;
  int64_t least = search(Cut::ELEMENT, kNoLimit, inside);
  int64_t most = least + std::max(align_, static_cast<int64_t>(least * kPaddingForRows));
  cut_ = Cut::ROW;
  shard_ = search(Cut::ROW, most, offsets_);
  if (shard_ > 0) return;
  cut_ = Cut::ELEMENT;
  shard_ = least;
  offsets_ = std::move(inside);
}

// The elements between which cuts may fall. Blocks begin at multiples of the alignment, as shards
// do, so blocks alone need no more.
int64_t Layout::row_of(const Extent& p, Cut cut) const {
  if (cut == Cut::ELEMENT) return 1;
  const int64_t row = std::max<int64_t>(1, cut == Cut::TENSOR ? p.numel : p.row);
  return blocks_ && cut == Cut::ROW ? std::lcm(row, align_) : row;
}

// Packs the parameters into shards of `shard` elements; false if they don't fit.
bool Layout::place(int64_t shard, Cut cut, std::vector<int64_t>& offsets) const {
  offsets.clear();
  int64_t at = 0;
  for (const Extent& given : parameters_) {
    Extent p{given.numel, row_of(given, cut)};
    if (blocks_ || p.numel >= kAlign) at = aligned(at);
    if (!cuts_on_rows(at, p, shard)) {
      // Move it so that the next cut falls between rows, or to that cut.
      int64_t cut_at = next_cut(at, shard);
      at += (cut_at - at) % p.row;
      if (!cuts_on_rows(at, p, shard)) at = cut_at;
      if (!cuts_on_rows(at, p, shard)) return false;
    }
    offsets.push_back(at);
    at += p.numel;
    if (at > shard * world_) return false;
  }
  return true;
}

// The smallest shard up to `limit` that holds the parameters; 0 if there is none.
int64_t Layout::search(Cut cut, int64_t limit, std::vector<int64_t>& offsets) const {
  int64_t least = std::max(align_, aligned((used_ + world_ - 1) / world_));
  // A parameter longer than three shards contains two cuts, so the shard is a multiple of its row.
  int64_t step = align_;
  for (const Extent& p : parameters_) {
    int64_t row = row_of(p, cut);
    if (p.numel < 3 * least || cut == Cut::TENSOR) continue;
    int64_t both = std::lcm(step, row);
    if (both > least) break;  // try sizes one by one instead
    step = both;
  }
  int64_t shard = (least + step - 1) / step * step;
  for (int64_t tries = 0; shard <= limit; ++tries) {
    if (place(shard, cut, offsets)) return shard;
    // Far above the minimum, ending the search matters more than the exact size.
    if (tries > 20000) step = std::max(step, aligned(shard / 64));
    shard += step;
  }
  return 0;
}

Slice Layout::slice(size_t parameter, int rank) const {
  int64_t first = offsets_[parameter], last = first + parameters_[parameter].numel;
  int64_t from = std::max(first, rank * shard_), to = std::min(last, (rank + 1) * shard_);
  if (from >= to) return {0, 0, 0};
  return {from - first, to - from, from - rank * shard_};
}

}  // namespace fsdp::shard
