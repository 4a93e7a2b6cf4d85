// What libfsdp_cuda.so exports for communication and host memory.
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAFunctions.h>
#include <nccl.h>

#include "base/format.h"
#include "comm/modules.h"
#include "comm/nccl/graph.h"
#include "comm/nccl/memory_segments.h"
#include "comm/nccl/nccl_backend.h"

namespace fsdp::comm {
namespace {

c10::intrusive_ptr<Backend> make(const BackendRequest& request) {
  return c10::make_intrusive<NcclBackend>(request);
}

int devices() {
  return c10::cuda::device_count();
}

void select(int device) {
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(device));
}

std::string describe_nccl() {
  int version = 0;
  ncclGetVersion(&version);
  return formatted("NCCL {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

std::string device_name(int device) {
  return at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(device))->name;
}

bool pin(void* memory, size_t bytes) {
  if (cudaHostRegister(memory, bytes, cudaHostRegisterPortable) == cudaSuccess) return true;
  (void)cudaGetLastError();  // or the next call would report it
  return false;
}

void unpin(void* memory) {
  if (cudaHostUnregister(memory) != cudaSuccess) (void)cudaGetLastError();
}

constexpr Module kModule{make,       devices, select, nullptr,      describe_nccl,  device_name,
                         make_graph, pin,     unpin,  watch_memory, memory_segments};

}  // namespace
}  // namespace fsdp::comm

extern "C" const fsdp::comm::Module* fsdp_module() {
  return &fsdp::comm::kModule;
}
