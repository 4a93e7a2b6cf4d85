#include "kernels/simulated/simulated.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kernels/simulated/cuda_of_torch.h"

namespace simulate {
void set_reversed(bool reversed);  // of simulate.h, whose names clash with LibTorch's
}

namespace fsdp::kernels {
namespace {

const CudaUpdates* updates = nullptr;

// Memory of one tensor: [Margin | 0xff … | the tensor | 0xff … ][an inaccessible page].
struct Margin {
  size_t mapped;  // bytes without the last page
  size_t begin;   // of the tensor
  size_t bytes;
};

constexpr size_t kAlignment = 64;
constexpr size_t kLeastBefore = 256;
constexpr int kFill = 0xff;  // a NaN in every dtype

size_t page() {
  return static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

[[noreturn]] void fail(const char* what, size_t bytes) {
  std::fprintf(stderr, "guarded memory: %s a tensor of %zu bytes\n", what, bytes);
  std::abort();
}

void give_back(void* context) {
  auto* memory = static_cast<unsigned char*>(context);
  const Margin margin = *static_cast<Margin*>(context);
  const auto untouched = [](unsigned char byte) { return byte == kFill; };
  if (!std::all_of(memory + sizeof(Margin), memory + margin.begin, untouched))
    fail("memory was written before", margin.bytes);
  if (!std::all_of(memory + margin.begin + margin.bytes, memory + margin.mapped, untouched))
    fail("memory was written after", margin.bytes);
  munmap(memory, margin.mapped + page());
}

struct GuardedMemory : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, cpu};
    const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    const size_t mapped = (rounded + kLeastBefore + page() - 1) / page() * page();
    void* memory =
        mmap(nullptr, mapped + page(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fail("no memory for", bytes);
    auto* start = static_cast<unsigned char*>(memory);
    mprotect(start + mapped, page(), PROT_NONE);
    std::memset(start, kFill, mapped);
    *static_cast<Margin*>(memory) = {mapped, mapped - rounded, bytes};
    return {start + mapped - rounded, memory, give_back, cpu};
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }
};

// LibTorch warns when a kernel replaces another; here that is intended.
struct Silence : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace

struct Simulated::Registration {
  torch::Library library{torch::Library::IMPL, "fsdp", c10::DispatchKey::CPU, __FILE__, __LINE__};
};

Simulated::Simulated(bool reversed) : registration_(std::make_unique<Registration>()) {
  Silence silence;
  const c10::WarningUtils::WarningHandlerGuard guard(&silence);
  simulate::set_reversed(reversed);
  register_simulated(registration_->library);
}

Simulated::~Simulated() {
  simulate::set_reversed(false);
}

void set_simulated_updates(const CudaUpdates* table) {
  updates = table;
}

const CudaUpdates& simulated_updates() {
  return *updates;
}

void guard_memory() {
  static GuardedMemory memory;
  c10::SetCPUAllocator(&memory, /*priority=*/1);
}

}  // namespace fsdp::kernels
