// What the modules that are loaded on demand (base/modules.h) do for communication. Each exports
// one C function that returns its table of functions.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "comm/backend.h"
#include "comm/device_graph.h"

namespace fsdp::comm {

class Liveness;

struct BackendRequest {
  c10::intrusive_ptr<c10d::Store> store;  // private to the communicator
  std::string name;
  int rank;
  int size;
  std::vector<int> ranks;  // world ranks, in the communicator's order
  std::chrono::milliseconds timeout;
  std::shared_ptr<Liveness> liveness;
  at::Device device = at::kCPU;
};

struct Module {
  c10::intrusive_ptr<Backend> (*make)(const BackendRequest& request);
  int (*devices)();            // GPUs this process can use (cuda)
  void (*select)(int device);  // makes it the thread's device (cuda)
  // Returns rank 0's text on every rank of mpirun (mpi); throws an Error if MPI has another rank or
  // size.
  std::string (*agree)(const std::string& mine, int rank, int size);
  std::string (*describe)();               // versions, for fsdp doctor
  std::string (*device_name)(int device);  // as the driver reports it (cuda)
  // A graph, in the memory pool of `sibling` if there is one (cuda).
  std::unique_ptr<DeviceGraph> (*make_graph)(const DeviceGraph* sibling);
  // Pins host memory for copies by any GPU; false if the driver refuses (cuda).
  bool (*pin)(void* memory, size_t bytes);
  void (*unpin)(void* memory);
  // nccl/memory_segments.h (cuda)
  void (*watch_memory)();
  std::vector<c10::CachingDeviceAllocator::SegmentInfo> (*memory_segments)();
};

// "mpi" or "cuda". find_module() returns null if the module wasn't built or can't be loaded, and
// sets `why`; require_module() throws that reason.
const Module* find_module(const std::string& name, std::string* why = nullptr);
const Module* require_module(const std::string& name);

}  // namespace fsdp::comm
