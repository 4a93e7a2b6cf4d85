// HostBlocks: pinned host memory for copies between a device's tensors and files. Two blocks take
// turns: while one is written or read, the other is copied.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <functional>
#include <optional>

#include "shard/device_stream.h"

namespace fsdp::checkpoint {

class HostBlocks {
 public:
  static constexpr int64_t kBytes = 16 << 20;  // of one block

  // A block of bytes whose copies are done; pinned if the device has streams.
  at::Tensor next(at::Device device);
  // Call after queueing copies of the last block from next() on the device's current stream.
  void copying(at::Device device);
  void wait();  // for the copies of the last block from next()

 private:
  struct Block {
    at::Tensor memory;
    std::optional<c10::Event> copied;
  };
  std::array<Block, 2> blocks_;
  size_t current_ = 0;
};

// Passes the elements of a tensor to `use` in memory order. The tensor must be dense in some order.
void for_each_piece(const at::Tensor& tensor,
                    const std::function<void(const void* bytes, size_t size)>& use);

}  // namespace fsdp::checkpoint
