// Graphs of the CUDA module: at::cuda::CUDAGraph, and a way out of a recording that failed.
#pragma once

#include <memory>

#include "comm/device_graph.h"

namespace fsdp::comm {

std::unique_ptr<DeviceGraph> make_graph(const DeviceGraph* sibling);

}  // namespace fsdp::comm
