#include "train/memory_snapshot.h"

#include <algorithm>
#include <fstream>

#include "base/regular_file.h"
#include "checkpoint/pickle.h"
#include "comm/modules.h"

namespace fsdp::train {
namespace {

using c10::CachingDeviceAllocator::BlockInfo;
using c10::CachingDeviceAllocator::SegmentInfo;
using checkpoint::pickle::Writer;

class SnapshotWriter {
 public:
  std::string write(const std::vector<SegmentInfo>& segments) {
    out_.empty_dict();
    out_.mark();
    out_.string("segments");
    out_.empty_list();
    out_.mark();
    size_t devices = 0;
    for (const SegmentInfo& segment : segments) {
      add(segment);
      devices = std::max(devices, static_cast<size_t>(segment.device) + 1);
    }
    out_.append_all();
    out_.string("device_traces");  // one list of events per device
    out_.empty_list();
    out_.mark();
    for (size_t i = 0; i < devices; ++i) out_.empty_list();
    out_.append_all();
    out_.set_all();
    return out_.finish();
  }

 private:
  void entry(const char* key, size_t value) {
    out_.string(key);
    out_.integer(static_cast<int64_t>(value));
  }

  void add(const SegmentInfo& segment) {
    out_.empty_dict();
    out_.mark();
    entry("device", static_cast<size_t>(segment.device));
    entry("address", segment.address);
    entry("total_size", segment.total_size);
    entry("allocated_size", segment.allocated_size);
    entry("active_size", segment.active_size);
    entry("requested_size", segment.requested_size);
    entry("stream", reinterpret_cast<size_t>(segment.stream));
    out_.string("segment_type");
    out_.string(segment.is_large ? "large" : "small");
    out_.string("segment_pool_id");
    out_.mark();
    out_.integer(static_cast<int64_t>(segment.owner_private_pool_id.first));
    out_.integer(static_cast<int64_t>(segment.owner_private_pool_id.second));
    out_.tuple();
    out_.string("is_expandable");
    out_.boolean(segment.is_expandable);
    no_frames();
    out_.string("blocks");
    out_.empty_list();
    out_.mark();
    size_t address = segment.address;
    for (const BlockInfo& block : segment.blocks) {
      add(block, address);
      address += block.size;
    }
    out_.append_all();
    out_.set_all();
  }

  void add(const BlockInfo& block, size_t address) {
    out_.empty_dict();
    out_.mark();
    entry("address", address);
    entry("size", block.size);
    entry("requested_size", block.requested_size);
    out_.string("state");
    out_.string(block.allocated ? "active_allocated"
                : block.active  ? "active_pending_free"
                                : "inactive");
    no_frames();
    out_.set_all();
  }

  void no_frames() {
    out_.string("frames");
    out_.empty_list();
  }

  Writer out_;
};

const comm::Module* cuda_module(at::Device device) {
  return device.is_cuda() ? comm::find_module("cuda") : nullptr;
}

}  // namespace

std::string pickled_snapshot(const std::vector<SegmentInfo>& segments) {
  return SnapshotWriter().write(segments);
}

void watch_memory(at::Device device) {
  const comm::Module* cuda = cuda_module(device);
  if (cuda && cuda->watch_memory) cuda->watch_memory();
}

bool write_memory_snapshot(at::Device device, const std::filesystem::path& file) {
  const comm::Module* cuda = cuda_module(device);
  if (!cuda || !cuda->memory_segments) return false;
  std::ofstream out(place_of_file(file), std::ios::binary | std::ios::trunc);
  out << pickled_snapshot(cuda->memory_segments());
  out.close();
  return static_cast<bool>(out);
}

}  // namespace fsdp::train
