#include "checkpoint/staging.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <sys/mman.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstring>
#include <optional>

#include "shard/device_stream.h"

namespace fsdp::checkpoint {
namespace {

constexpr int64_t kSlabAlignment = 64;
constexpr int64_t kCopyPiece = 2 << 20;  // bytes per copy of one thread
constexpr int64_t kSlab = 1 << 30;       // bytes, but for tensors that are larger

int64_t aligned(int64_t bytes) {
  return (bytes + kSlabAlignment - 1) / kSlabAlignment * kSlabAlignment;
}

struct Spot {
  size_t slab;
  int64_t begin;

  // The place of the next `bytes`: at the end of the last slab, or in a new one if they don't fit.
  // `slabs` are the bytes used in each.
  static Spot next(std::vector<int64_t>& slabs, int64_t bytes) {
    if (slabs.empty() || slabs.back() + bytes > kSlab) slabs.push_back(0);
    const Spot place{slabs.size() - 1, slabs.back()};
    slabs.back() += aligned(bytes);
    return place;
  }
};

// A little more, so that a plan with a few more values needs no new slab.
int64_t with_room(int64_t bytes) {
  constexpr int64_t kRoom = 1 << 20;
  return bytes > kSlab ? bytes : std::min((bytes / kRoom + 2) * kRoom, kSlab);
}

// Touches every page of fresh memory, with huge pages if the kernel provides them.
void make_present(const at::Tensor& memory) {
  constexpr uintptr_t kLargePage = 2 << 20;
  constexpr int64_t kPage = 4096;
  auto* bytes = static_cast<char*>(memory.data_ptr());
  const auto begin = reinterpret_cast<uintptr_t>(bytes), end = begin + memory.nbytes();
  const auto first = (begin + kLargePage - 1) / kLargePage * kLargePage;
  const auto last = end / kLargePage * kLargePage;
  if (last > first) ::madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  for (int64_t at = 0; at < memory.numel(); at += kPage) bytes[at] = 0;
}

// Like memcpy, but bypasses the caches: memcpy would first read the memory that it overwrites.
void copy_through(char* to, const char* from, int64_t bytes) {
  int64_t at = 0;
#if defined(__SSE2__)
  for (; at + kSlabAlignment <= bytes; at += kSlabAlignment)
    for (int64_t word = at; word < at + kSlabAlignment; word += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + word),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + word)));
  _mm_sfence();
#endif
  std::memcpy(to + at, from + at, static_cast<size_t>(bytes - at));
}

struct Copy {
  char* to;
  at::Tensor from;  // dense, on the host
};

void copy_on_host(const std::vector<Copy>& copies) {
  struct Piece {
    char* to;
    const char* from;
    int64_t bytes;
  };
  std::vector<Piece> pieces;
  for (const auto& copy : copies) {
    const auto* from = static_cast<const char*>(copy.from.const_data_ptr());
    const auto bytes = static_cast<int64_t>(copy.from.nbytes());
    for (int64_t at = 0; at < bytes; at += kCopyPiece)
      pieces.push_back({copy.to + at, from + at, std::min(kCopyPiece, bytes - at)});
  }
  at::parallel_for(0, static_cast<int64_t>(pieces.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      copy_through(pieces[i].to, pieces[i].from, pieces[i].bytes);
  });
}

}  // namespace

Staging::Size Staging::size_of(const SavePlan& plan) {
  Size size;
  for (const auto& chunk : plan.chunks) {
    Spot::next(size.slabs, static_cast<int64_t>(chunk.part.memory.nbytes()));
    size.pinned |= !chunk.device().is_cpu();
  }
  return size;
}

void Staging::reserve(const Size& size) {
  for (size_t i = 0; i < size.slabs.size(); ++i) {
    if (i == slabs_.size()) slabs_.emplace_back();
    at::Tensor& slab = slabs_[i];
    const bool enough = slab.defined() && slab.numel() >= size.slabs[i];
    if (enough && (slab.is_pinned() || !size.pinned)) continue;
    slab = at::Tensor();  // before the new one is allocated
    slab = at::empty({with_room(size.slabs[i])},
                     at::TensorOptions(at::kByte).pinned_memory(size.pinned));
    if (!size.pinned) make_present(slab);
  }
}

void Staging::take(SavePlan& plan) {
  reserve(size_of(plan));
  std::optional<at::Device> device;  // other than the host
  std::vector<Copy> copies;
  std::vector<int64_t> filled;  // of each slab
  ChunkReader reader(plan);
  for (auto& chunk : plan.chunks) {
    if (!reader.is_at(chunk)) {  // reading the next flat frees the last one
      copy_on_host(copies);
      copies.clear();
    }
    const at::Tensor memory = reader.read(chunk);
    const auto size = static_cast<int64_t>(memory.nbytes());
    const Spot place = Spot::next(filled, size);
    const at::Tensor staged =
        slabs_[place.slab].narrow(0, place.begin, size).view(memory.scalar_type());
    const at::Tensor flat = memory.as_strided({memory.numel()}, {1});
    if (!flat.is_cpu()) {
      device = flat.device();
      staged.copy_(flat, /*non_blocking=*/true);
    } else if (size > 0) {
      copies.push_back({static_cast<char*>(staged.data_ptr()), flat});
    }
    chunk.part.memory = staged.as_strided(memory.sizes(), memory.strides());
    chunk.source.reset();
  }
  copy_on_host(copies);
  if (device) shard::current_stream(*device).synchronize();
}

}  // namespace fsdp::checkpoint
