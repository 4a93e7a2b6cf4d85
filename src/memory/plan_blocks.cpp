#include "memory/plan_blocks.h"

#include <algorithm>

namespace fsdp::memory {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kRound = 512;
constexpr int64_t kSmallBlock = kMiB;  // blocks up to this size come from small segments
constexpr int64_t kSmallSegment = 2 * kMiB;
constexpr int64_t kMedium = 10 * kMiB;  // blocks below this size share a segment
constexpr int64_t kMediumSegment = 20 * kMiB;
constexpr int64_t kLargeRound = 2 * kMiB;

int64_t up(int64_t bytes, int64_t to) {
  return (bytes + to - 1) / to * to;
}

int64_t segment_size(int64_t bytes) {
  if (bytes <= kSmallBlock) return kSmallSegment;
  return bytes < kMedium ? kMediumSegment : up(bytes, kLargeRound);
}

}  // namespace

Blocks::~Blocks() = default;

void Blocks::add_free(Block* block) {
  (block->segment->small ? small_ : large_).emplace(block->size, block);
}

void Blocks::remove_free(Block* block) {
  Free& free = block->segment->small ? small_ : large_;
  auto [from, to] = free.equal_range(block->size);
  free.erase(std::find_if(from, to, [&](const auto& entry) { return entry.second == block; }));
}

Blocks::Block* Blocks::allocate(int64_t bytes) {
  int64_t size = std::max(up(bytes, kRound), kRound);
  bool small = size <= kSmallBlock;
  Free& free = small ? small_ : large_;
  Block* block = nullptr;
  if (auto best = free.lower_bound(size); best != free.end()) {
    block = best->second;
    free.erase(best);
  } else {
    auto segment = std::make_unique<Segment>();
    segment->size = segment_size(size);
    segment->small = small;
    segment->blocks.push_back({segment->size, false, segment.get(), {}});
    block = &segment->blocks.back();
    block->self = std::prev(segment->blocks.end());
    segments_.insert(std::move(segment));
  }
  int64_t left = block->size - size;
  if (small ? left >= kRound : left > kSmallBlock) {
    auto& blocks = block->segment->blocks;
    auto rest = blocks.insert(std::next(block->self), {left, false, block->segment, {}});
    rest->self = rest;
    block->size = size;
    add_free(&*rest);
  }
  block->used = true;
  allocated_ += block->size;
  if (block->segment->used == 0) held_ += block->segment->size;
  block->segment->used += block->size;
  return block;
}

void Blocks::release(Block* block) {
  Segment& segment = *block->segment;
  block->used = false;
  allocated_ -= block->size;
  segment.used -= block->size;
  if (segment.used == 0) held_ -= segment.size;
  auto swallow = [&](std::list<Block>::iterator other) {
    remove_free(&*other);
    block->size += other->size;
    segment.blocks.erase(other);
  };
  if (auto next = std::next(block->self); next != segment.blocks.end() && !next->used)
    swallow(next);
  if (block->self != segment.blocks.begin() && !std::prev(block->self)->used)
    swallow(std::prev(block->self));
  add_free(block);
}

}  // namespace fsdp::memory
