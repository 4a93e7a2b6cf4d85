#include "shard/pinned_memory.h"

#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <sys/mman.h>

#include <algorithm>
#include <new>

#include "comm/modules.h"
#include "shard/device_stream.h"

namespace fsdp::shard {
namespace {

constexpr size_t kLargePage = 2 << 20;
constexpr size_t kPage = 4096;
constexpr int64_t kSmall = 1 << 20;  // bytes; below them LibTorch's cache of small pieces is better

size_t rounded(int64_t bytes) {
  return (static_cast<size_t>(bytes) + kLargePage - 1) / kLargePage * kLargePage;
}

// Zeros that start at a multiple of kLargePage.
char* map(size_t bytes) {
  void* got = ::mmap(nullptr, bytes + kLargePage, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (got == MAP_FAILED) throw std::bad_alloc();
  auto* all = static_cast<char*>(got);
  const size_t before = kLargePage - reinterpret_cast<uintptr_t>(all) % kLargePage;
  ::munmap(all, before);
  if (before < kLargePage) ::munmap(all + before + bytes, kLargePage - before);
  ::madvise(all + before, bytes, MADV_HUGEPAGE);  // a hint
  return all + before;
}

void touch(char* memory, size_t bytes) {
  at::parallel_for(0, static_cast<int64_t>(bytes / kLargePage), 1, [&](int64_t begin, int64_t end) {
    for (auto at = static_cast<size_t>(begin) * kLargePage;
         at < static_cast<size_t>(end) * kLargePage; at += kPage)
      static_cast<volatile char*>(memory)[at] = 0;
  });
}

}  // namespace

at::Tensor pinned_memory(int64_t bytes, at::Device device) {
  const bool pinned = has_streams(device);
  const comm::Module* module = pinned ? comm::find_module("cuda") : nullptr;
  const auto plain = [&] {
    return at::zeros({bytes}, at::TensorOptions(at::kByte).pinned_memory(pinned));
  };
  if (bytes < kSmall || (pinned && (!module || !module->pin))) return plain();
  const size_t size = rounded(bytes);
  char* memory = map(size);
  touch(memory, size);
  if (pinned && !module->pin(memory, size)) {
    ::munmap(memory, size);
    return plain();
  }
  return at::from_blob(
      memory, {bytes},
      [size, unpin = pinned ? module->unpin : nullptr](void* freed) {
        if (unpin) unpin(freed);
        ::munmap(freed, size);
      },
      at::kByte);
}

}  // namespace fsdp::shard
