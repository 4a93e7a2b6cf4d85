// Items: tensors and values as torch.save writes them. Whatever is found is read, whole and in
// part.
#include <ATen/ops/empty.h>

#include <cstdlib>
#include <cstring>

#include "checkpoint/host_blocks.h"
#include "checkpoint/item.h"
#include "fsdp/error.h"
#include "fuzz/memory_file.h"

namespace checkpoint = fsdp::checkpoint;

namespace {

void read_tensor(const checkpoint::files::Input& file, const checkpoint::ItemPlace& place) {
  const auto tensor = checkpoint::find_tensor(file, place, "fuzzed");
  // In a real load the sizes come from `.metadata`. A view that repeats one element may have any
  // number of elements without storing them.
  int64_t elements = 1;
  for (int64_t size : tensor.sizes)
    if (__builtin_mul_overflow(elements, size, &elements) || elements > 1 << 16) return;
  if (tensor.sizes.size() > 8) return;
  static checkpoint::HostBlocks blocks;
  std::vector<int64_t> from(tensor.sizes.size(), 0);
  const auto options = at::TensorOptions().dtype(tensor.dtype);
  checkpoint::read_part(file, tensor, from, at::empty(tensor.sizes, options), blocks);
  if (tensor.sizes.empty() || elements == 0) return;
  std::vector<int64_t> sizes = tensor.sizes;
  for (size_t d = 0; d < sizes.size(); ++d) {
    from[d] = sizes[d] / 2;
    sizes[d] -= from[d];
  }
  checkpoint::read_part(file, tensor, from, at::empty(sizes, options.dtype(at::kDouble)), blocks);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static fsdp::fuzz::MemoryFile memory;
  memory.fill(data, size);
  const checkpoint::ItemPlace place{"fuzzed", 0, static_cast<int64_t>(size)};
  try {
    const checkpoint::files::Input file(memory.path());
    read_tensor(file, place);
  } catch (const fsdp::Error&) {
  }
  try {
    const checkpoint::files::Input file(memory.path());
    checkpoint::read_value(file, place, "fuzzed");
  } catch (const fsdp::Error&) {
  }
  return 0;
}
