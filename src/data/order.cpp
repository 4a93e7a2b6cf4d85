// A Feistel network permutes [0, m), where m is a power of four and at least n. A value outside
// [0, n) is permuted again until it falls inside. The walk follows a cycle of the permutation, so
// it ends, and it maps [0, n) onto itself one to one.
#include "data/order.h"

#include <algorithm>
#include <bit>

namespace fsdp::data {
namespace {

constexpr int kRounds = 6;
// A network over a few bits mixes poorly, so small n walk in a domain of 2^12. The cost is
// negligible.
constexpr int kLeastHalf = 6;  // bits

}  // namespace

uint64_t mixed(uint64_t value) {
  value ^= value >> 30;
  value *= 0xbf58476d1ce4e5b9ull;
  value ^= value >> 27;
  value *= 0x94d049bb133111ebull;
  return value ^ value >> 31;
}

int64_t shuffled(int64_t i, int64_t n, uint64_t seed, int64_t epoch) {
  if (n <= 1) return 0;
  int bits = std::bit_width(static_cast<uint64_t>(n - 1));
  int half = std::max((bits + 1) / 2, kLeastHalf);
  uint64_t mask = (uint64_t{1} << half) - 1;
  uint64_t key = mixed(mixed(seed + 0x9e3779b97f4a7c15ull) + static_cast<uint64_t>(epoch));
  auto value = static_cast<uint64_t>(i);
  do {
    uint64_t left = value >> half, right = value & mask;
    for (int round = 1; round <= kRounds; ++round) {
      uint64_t turned = left ^ (mixed(key + round * 0x9e3779b97f4a7c15ull + right) & mask);
      left = right;
      right = turned;
    }
    value = left << half | right;
  } while (value >= static_cast<uint64_t>(n));
  return static_cast<int64_t>(value);
}

}  // namespace fsdp::data
