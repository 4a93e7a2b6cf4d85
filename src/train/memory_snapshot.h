// A snapshot of a GPU's memory for PyTorch's viewer (https://pytorch.org/memory_viz): the
// allocator's segments and what is allocated in them, as the pickle that
// torch.cuda.memory._dump_snapshot writes. There is no history: a run doesn't record one, so the
// viewer shows one moment.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <filesystem>
#include <string>
#include <vector>

namespace fsdp::train {

std::string pickled_snapshot(const std::vector<c10::CachingDeviceAllocator::SegmentInfo>& segments);

// From now on the memory at the moment of a failure is remembered. Does nothing on the CPU.
void watch_memory(at::Device device);
// Writes the memory at the last failure. False if there is no GPU or the file can't be written.
bool write_memory_snapshot(at::Device device, const std::filesystem::path& file);

}  // namespace fsdp::train
