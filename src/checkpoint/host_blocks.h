// HostBlocks: pinned memory on the host through which tensors of a device go to a file and come
// from one, two blocks in turn: while one is written or read, the other is copied.
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

  // A block whose copies are done, as bytes; pinned if it is for a device that has streams.
  at::Tensor next(at::Device device);
  // Copies from or to the block handed out last were put on the current stream of the device.
  void copying(at::Device device);
  void wait();  // for the copies of the block handed out last

 private:
  struct Block {
    at::Tensor memory;
    std::optional<c10::Event> copied;
  };
  std::array<Block, 2> blocks_;
  size_t current_ = 0;
};

// Hands the elements of a tensor that is dense in some order to `use`, as they lie in memory.
void for_each_piece(const at::Tensor& tensor,
                    const std::function<void(const void* bytes, size_t size)>& use);

}  // namespace fsdp::checkpoint
