// Graphs of the CUDA module: at::cuda::CUDAGraph, plus recovery from a failed recording.
#pragma once

#include <memory>

#include "comm/device_graph.h"

namespace fsdp::comm {

std::unique_ptr<DeviceGraph> make_graph(const DeviceGraph* sibling);

}  // namespace fsdp::comm
