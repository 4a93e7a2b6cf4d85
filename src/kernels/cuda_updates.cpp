#include "kernels/cuda_updates.h"

#include <atomic>

#include "base/modules.h"

namespace fsdp::kernels {
namespace {

std::atomic<const CudaUpdates*> loaded{nullptr};

}  // namespace

void set_cuda_updates(const CudaUpdates* table) {
  loaded = table;
}

const CudaUpdates* cuda_updates(at::Device device) {
  if (!device.is_cuda()) return nullptr;
  if (!loaded) find_library("cuda");
  return loaded;
}

}  // namespace fsdp::kernels
