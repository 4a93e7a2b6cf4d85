#include "checkpoint/stream.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <set>

#include "base/format.h"
#include "checkpoint/overlap.h"
#include "fsdp/error.h"

namespace fsdp::checkpoint {
namespace {

[[noreturn]] void refuse_size() {
  throw Error("a tensor of the checkpoint has an impossible number of elements.",
              "the checkpoint is damaged; use another one.");
}

int64_t product(int64_t a, int64_t b) {
  int64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) refuse_size();
  return result;
}

// Cuts dimension `dim`; `at` fixes one index of each dimension before it.
void cut(const std::vector<int64_t>& sizes, int64_t most, size_t dim, Rectangle& at,
         const std::function<void(const Rectangle&)>& take) {
  if (dim == sizes.size()) return take(at);
  int64_t inner = 1;  // elements per index
  for (size_t d = dim + 1; d < sizes.size(); ++d) inner *= sizes[d];
  const int64_t rows = std::max<int64_t>(1, most / inner);
  for (int64_t begin = 0; begin < sizes[dim]; begin += rows) {
    at.offsets[dim] = begin;
    at.sizes[dim] = std::min(rows, sizes[dim] - begin);
    if (inner > most)
      cut(sizes, most, dim + 1, at, take);
    else
      take(at);
  }
}

// Where the bytes of a tensor are, as a text that two names share only if they are one tensor.
std::string place_text(const std::string& name, const TensorEntry& entry) {
  if (count_of(entry.sizes) == 0) return name;  // without elements, nothing is shared
  std::string text = std::to_string(static_cast<int>(entry.dtype)) + shape_text(entry.sizes);
  for (const auto& chunk : entry.chunks)
    text += formatted("\n{}:{}{}{}", chunk.place.file, chunk.place.offset,
                      shape_text(chunk.rectangle.offsets), shape_text(chunk.rectangle.sizes));
  return text;
}

}  // namespace

int64_t count_of(const std::vector<int64_t>& sizes) {
  for (int64_t size : sizes)
    if (size == 0) return 0;
  int64_t count = 1;
  for (int64_t size : sizes) count = product(count, size);
  return count;
}

std::vector<int64_t> sizes_of(const Source& source, const Copied& tensor) {
  if (!tensor.part) return source.metadata().tensors.at(tensor.from).sizes;
  std::vector<int64_t> sizes = tensor.part->sizes;
  if (sizes.size() > 1 && sizes.front() == 1) sizes.erase(sizes.begin());
  return sizes;
}

int64_t bytes_of(const Source& source, const Copied& tensor) {
  return product(count_of(sizes_of(source, tensor)),
                 static_cast<int64_t>(c10::elementSize(tensor.dtype)));
}

int64_t bytes_of(const Source& source, const std::vector<Copied>& tensors) {
  int64_t sum = 0;
  for (const auto& tensor : tensors)
    if (__builtin_add_overflow(sum, bytes_of(source, tensor), &sum)) refuse_size();
  return sum;
}

void for_each_rectangle(const std::vector<int64_t>& sizes, int64_t most,
                        const std::function<void(const Rectangle&)>& take) {
  if (count_of(sizes) == 0) return;
  Rectangle at = everything(sizes);
  cut(sizes, most, 0, at, take);
}

void stream(Source& source, const std::string& name, at::ScalarType dtype,
            const std::function<void(const Part&)>& take) {
  stream(source, name, everything(source.metadata().tensors.at(name).sizes), dtype, take);
}

void stream(Source& source, const std::string& name, const Rectangle& wanted, at::ScalarType dtype,
            const std::function<void(const Part&)>& take) {
  source.check(name, wanted);
  const int64_t most = kPieceBytes / static_cast<int64_t>(c10::elementSize(dtype));
  const at::Tensor memory =
      at::empty({std::min(most, count_of(wanted.sizes))}, at::TensorOptions().dtype(dtype));
  for_each_rectangle(wanted.sizes, most, [&](Rectangle piece) {
    for (size_t d = 0; d < piece.offsets.size(); ++d) piece.offsets[d] += wanted.offsets[d];
    const Part part{piece, memory.narrow(0, 0, count_of(piece.sizes)).view(piece.sizes)};
    source.read(name, part);
    take(part);
  });
}

void stream_bytes(Source& source, const Copied& tensor,
                  const std::function<void(const void*, size_t)>& take, const Advance& advance) {
  const at::ScalarType read = tensor.change ? at::kFloat : tensor.dtype;
  const Rectangle wanted =
      tensor.part ? *tensor.part : everything(source.metadata().tensors.at(tensor.from).sizes);
  stream(source, tensor.from, wanted, read, [&](const Part& part) {
    if (tensor.change) tensor.change(part);
    const at::Tensor memory = part.memory.to(tensor.dtype);
    take(memory.const_data_ptr(), memory.nbytes());
    if (advance) advance(static_cast<int64_t>(memory.nbytes()));
  });
}

std::vector<std::vector<std::string>> by_bytes(const Source& source,
                                               const std::vector<std::string>& names) {
  std::vector<std::vector<std::string>> groups;
  std::map<std::string, size_t> known;
  for (const auto& name : names) {
    const auto place = place_text(name, source.metadata().tensors.at(name));
    const auto [found, fresh] = known.emplace(place, groups.size());
    if (fresh) groups.emplace_back();
    groups[found->second].push_back(name);
  }
  return groups;
}

void check_amount(Source& source, const std::vector<std::string>& names) {
  int64_t wanted = 0, held = 0, most = -1;
  std::string largest;
  std::set<std::string> files;
  for (const auto& group : by_bytes(source, names)) {
    const TensorEntry& entry = source.metadata().tensors.at(group.front());
    const int64_t bytes = bytes_of(source, Copied{group.front(), "", entry.dtype});
    wanted = capped_sum(wanted, bytes);
    if (bytes > most) most = bytes, largest = group.front();
    for (const auto& chunk : entry.chunks)
      if (files.insert(chunk.place.file).second)
        held = capped_sum(held, source.bytes_of_file(chunk.place.file));
  }
  if (wanted > held)
    throw Error(
        formatted("{}: its tensors have {} bytes, but the files that hold them only {}; the "
                  "largest is \"{}\".",
                  source.dir(), wanted, held, largest),
        "the checkpoint is damaged; load another one.");
}

at::ScalarType converted(at::ScalarType dtype, const std::optional<at::ScalarType>& wanted) {
  return wanted && c10::isFloatingType(dtype) ? *wanted : dtype;
}

}  // namespace fsdp::checkpoint
