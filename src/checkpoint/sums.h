// Checksums of a file, block by block, so that a reader of a stretch can check just that stretch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fsdp::checkpoint {

inline constexpr int64_t kSumBlock = 256 << 10;  // bytes; the last block of a file may be shorter

struct FileSums {
  int64_t size = 0;            // of the file, in bytes
  std::vector<uint64_t> sums;  // XXH3 (64 bits) of each block
};

uint64_t block_sum(const void* data, size_t size);

// The number of blocks of a file of this size.
inline int64_t block_count(int64_t size) {
  return (size + kSumBlock - 1) / kSumBlock;
}

// The sums of a file's bytes, or of those from the begin of a block on.
std::vector<uint64_t> block_sums(const void* data, size_t size);

}  // namespace fsdp::checkpoint
