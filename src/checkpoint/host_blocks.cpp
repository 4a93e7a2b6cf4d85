#include "checkpoint/host_blocks.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace fsdp::checkpoint {

at::Tensor HostBlocks::next(at::Device device) {
  current_ = 1 - current_;
  wait();
  Block& block = blocks_[current_];
  const bool pinned = shard::has_streams(device);
  if (!block.memory.defined() || (pinned && !block.memory.is_pinned()))
    block.memory = at::empty({kBytes}, at::TensorOptions(at::kByte).pinned_memory(pinned));
  return block.memory;
}

void HostBlocks::copying(at::Device device) {
  if (!shard::has_streams(device)) return;
  Block& block = blocks_[current_];
  block.copied.emplace(device.type());
  block.copied->record(shard::current_stream(device));
}

void HostBlocks::wait() {
  Block& block = blocks_[current_];
  if (block.copied) block.copied->synchronize();
  block.copied.reset();
}

void for_each_piece(const at::Tensor& tensor,
                    const std::function<void(const void* bytes, size_t size)>& use) {
  if (tensor.numel() == 0) return;
  // In memory order, whatever the order of the dimensions.
  const at::Tensor flat = tensor.detach().as_strided({tensor.numel()}, {1});
  if (flat.is_cpu()) return use(flat.const_data_ptr(), flat.nbytes());
  const auto step = HostBlocks::kBytes / static_cast<int64_t>(flat.element_size());
  HostBlocks blocks;
  const auto start = [&](int64_t at) {
    const at::Tensor part = flat.narrow(0, at, std::min(step, flat.numel() - at));
    const at::Tensor host = blocks.next(flat.device())
                                .narrow(0, 0, static_cast<int64_t>(part.nbytes()))
                                .view(flat.scalar_type());
    host.copy_(part, /*non_blocking=*/true);
    blocks.copying(flat.device());
    return host;
  };
  at::Tensor current = start(0);
  for (int64_t at = step; current.defined(); at += step) {
    blocks.wait();  // for `current`
    const at::Tensor following = at < flat.numel() ? start(at) : at::Tensor();
    use(current.const_data_ptr(), current.nbytes());
    current = following;
  }
}

}  // namespace fsdp::checkpoint
