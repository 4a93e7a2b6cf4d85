#include "checkpoint/sums.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>

namespace fsdp::checkpoint {

uint64_t block_sum(const void* data, size_t size) {
  return XXH3_64bits(data, size);
}

std::vector<uint64_t> block_sums(const void* data, size_t size) {
  constexpr auto kWhole = static_cast<size_t>(kSumBlock);
  std::vector<uint64_t> sums;
  for (size_t at = 0; at < size; at += kWhole)
    sums.push_back(block_sum(static_cast<const char*>(data) + at, std::min(kWhole, size - at)));
  return sums;
}

}  // namespace fsdp::checkpoint
