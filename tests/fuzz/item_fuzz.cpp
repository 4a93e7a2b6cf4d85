// Items: tensors and values as torch.save writes them. Whatever is found is read, whole and in
// part.
#include <ATen/ops/empty.h>

#include <algorithm>
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
  int64_t elements = 1;
  for (int64_t size : tensor.sizes)
    if (__builtin_mul_overflow(elements, std::max<int64_t>(size, 1), &elements))
      return;  // none then
  for (int64_t size : tensor.sizes) elements = size == 0 ? 0 : elements;
  const auto element = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  if (elements > file.size() / element) std::abort();  // repeats what is stored
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
