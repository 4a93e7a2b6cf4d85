#include "checkpoint/sums.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>

namespace fsdp::checkpoint {

struct Summing::Hash {
  XXH3_state_t xxh3;
};

uint64_t block_sum(const void* data, size_t size) {
  return XXH3_64bits(data, size);
}

Summing::Summing() : state_(new Hash) {
  XXH3_64bits_reset(&state_->xxh3);
}

Summing::~Summing() {
  delete state_;
}

void Summing::append(const void* data, size_t size) {
  const auto* bytes = static_cast<const char*>(data);
  done_.size += static_cast<int64_t>(size);
  while (size > 0) {
    const size_t part = std::min(size, static_cast<size_t>(kSumBlock - filled_));
    if (part == static_cast<size_t>(kSumBlock)) {  // a whole block in one piece
      done_.sums.push_back(block_sum(bytes, part));
    } else {
      XXH3_64bits_update(&state_->xxh3, bytes, part);
      filled_ += static_cast<int64_t>(part);
      if (filled_ == kSumBlock) {
        done_.sums.push_back(XXH3_64bits_digest(&state_->xxh3));
        XXH3_64bits_reset(&state_->xxh3);
        filled_ = 0;
      }
    }
    bytes += part;
    size -= part;
  }
}

FileSums Summing::finish() {
  if (filled_ > 0) done_.sums.push_back(XXH3_64bits_digest(&state_->xxh3));
  filled_ = 0;
  return std::move(done_);
}

}  // namespace fsdp::checkpoint
