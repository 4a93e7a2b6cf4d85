#include "checkpoint/item.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "base/format.h"
#include "checkpoint/dtype.h"
#include "checkpoint/zip.h"
#include "fsdp/error.h"

namespace fsdp::checkpoint {
namespace {

constexpr int64_t kLargestPickle = 64 << 20;
constexpr int64_t kSmallRead = 64 << 10;  // bytes below which a read isn't split

// --- writing ---

void put_sizes(pickle::Writer& writer, at::IntArrayRef sizes) {
  writer.mark();
  for (int64_t size : sizes) writer.integer(size);
  writer.tuple();
}

// The records around the data are those of torch.save, in its order.
// `data`: how many bytes of a tensor follow, and they.
ItemPlace write_item(files::Output& out, const std::string& pickled, int64_t size = 0,
                     const Bytes& data = nullptr) {
  out.align(kRecordAlignment);
  ItemPlace place{out.path().filename().string(), out.position(), 0};
  ArchiveWriter archive(out);
  archive.add("data.pkl", pickled);
  uint64_t identity = archive.last_sum();
  archive.add(".format_version", "1");
  archive.add(".storage_alignment", std::to_string(kRecordAlignment));
  archive.add("byteorder", "little");
  if (data) {
    archive.begin("data/0", size);
    data([&](const void* bytes, size_t count) { archive.data(bytes, count); });
    archive.end();
    identity = identity << 32 | archive.last_sum();
  }
  archive.add("version", "3\n");
  archive.add(".data/serialization_id", zero_padded(identity, 40));
  place.length = archive.finish();
  return place;
}

// --- reading ---

bool allowed_in_item(const std::string& name) {
  static const std::vector<std::string> kNames = {
      "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3",
      "torch._utils._rebuild_parameter", "torch.storage.UntypedStorage",
      "torch.storage.TypedStorage",      "collections.OrderedDict",
  };
  if (std::find(kNames.begin(), kNames.end(), name) != kNames.end()) return true;
  if (!name.starts_with("torch.")) return false;
  return dtype_of(name.substr(6)) || dtype_of_storage(name.substr(6));
}

struct Shown {  // names the item in errors
  const files::Input& file;
  const std::string& where;
  [[noreturn]] void fail(const std::string& what) const {
    throw Error(formatted("{}: {} {}.", file.path(), where, what),
                "the file is damaged, or was written by a program that stores tensors differently; "
                "load another checkpoint.");
  }
};

std::vector<int64_t> numbers(const pickle::Pickled& value, const Shown& shown) {
  if (!value.is(pickle::kTuple)) shown.fail("has sizes that aren't a tuple");
  std::vector<int64_t> found;
  for (const auto& item : value.items) {
    if (!item->is(pickle::kInteger) || item->integer < 0)
      shown.fail("has sizes that aren't numbers");
    found.push_back(item->integer);
  }
  return found;
}

struct Extent {
  int64_t count = 1;  // of elements
  int64_t span = 1;   // the distance from the first to the last element, inclusive
};

// Fails on overflow.
Extent extent_of(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                 const Shown& shown) {
  Extent extent;
  for (int64_t size : sizes)
    if (size == 0) return {0, 0};
  for (size_t d = 0; d < sizes.size(); ++d) {
    int64_t reach = 0;
    if (__builtin_mul_overflow(sizes[d] - 1, strides[d], &reach) ||
        __builtin_add_overflow(extent.span, reach, &extent.span) ||
        __builtin_mul_overflow(extent.count, sizes[d], &extent.count))
      shown.fail("has impossible sizes");
  }
  return extent;
}

// Reads with all threads of this process, each a stretch of whole blocks.
void read_bytes(const files::Input& file, int64_t begin, char* into, int64_t size) {
  constexpr int64_t kStretch = 8 * kSumBlock;
  if (size < 2 * kStretch || at::get_num_threads() == 1)
    return file.read(begin, into, static_cast<size_t>(size));
  const int64_t end = begin + size, base = begin / kStretch;
  at::parallel_for(base, (end - 1) / kStretch + 1, 1, [&](int64_t from, int64_t to) {
    const int64_t low = std::max(begin, from * kStretch), high = std::min(end, to * kStretch);
    file.read(low, into + (low - begin), static_cast<size_t>(high - low));
  });
}

}  // namespace

void put_tensor(pickle::Writer& writer, at::ScalarType dtype, at::IntArrayRef sizes,
                at::IntArrayRef strides, const std::string& key) {
  const char* storage = storage_name(dtype);
  int64_t count = 1;
  for (int64_t size : sizes) count *= size;
  writer.global("torch._utils", storage ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
  writer.mark();
  writer.mark();
  writer.string("storage");
  writer.global(storage ? "torch" : "torch.storage", storage ? storage : "UntypedStorage");
  writer.string(key);
  writer.string("cpu");
  writer.integer(storage ? count : count * static_cast<int64_t>(c10::elementSize(dtype)));
  writer.tuple();
  writer.persistent();
  writer.integer(0);
  put_sizes(writer, sizes);
  put_sizes(writer, strides);
  writer.boolean(false);
  writer.global("collections", "OrderedDict");
  writer.empty_tuple();
  writer.call();
  if (!storage) writer.global("torch", dtype_name(dtype));
  writer.tuple();
  writer.call();
}

void put_value(pickle::Writer& writer, const Value& value) {
  if (const auto* integer = std::get_if<int64_t>(&value)) return writer.integer(*integer);
  if (const auto* real = std::get_if<double>(&value)) return writer.real(*real);
  if (const auto* flag = std::get_if<bool>(&value)) return writer.boolean(*flag);
  writer.string(std::get<std::string>(value));
}

ItemPlace write_tensor(files::Output& out, const at::Tensor& like, const Bytes& bytes) {
  pickle::Writer writer;
  put_tensor(writer, like.scalar_type(), like.sizes(), like.strides(), "0");
  return write_item(out, writer.finish(), static_cast<int64_t>(like.nbytes()), bytes);
}

ItemPlace write_tensor(files::Output& out, const at::Tensor& tensor) {
  return write_tensor(out, tensor, [&](const auto& use) { for_each_piece(tensor, use); });
}

ItemPlace write_value(files::Output& out, const std::function<void(pickle::Writer&)>& put) {
  pickle::Writer writer;
  put(writer);
  return write_item(out, writer.finish());
}

StoredTensor find_tensor(const files::Input& file, const ItemPlace& place,
                         const std::string& where) {
  const Shown shown{file, where};
  const ArchiveReader archive(file, place.offset, place.length, where);
  if (const auto order = archive.find("byteorder"))
    if (archive.read(*order, 64) != "little") shown.fail("was written on a big-endian machine");
  const auto text = archive.read(archive.need("data.pkl"), kLargestPickle);
  auto root = pickle::read(text, file.path().string() + ": " + where, allowed_in_item);
  const pickle::Pickled* tensor = root.get();
  if (tensor->is(pickle::kObject) && tensor->text == "torch._utils._rebuild_parameter" &&
      !tensor->arguments().empty())
    tensor = tensor->arguments()[0].get();
  const bool v3 = tensor->text == "torch._utils._rebuild_tensor_v3";
  if (!tensor->is(pickle::kObject) || (!v3 && tensor->text != "torch._utils._rebuild_tensor_v2") ||
      tensor->arguments().size() < (v3 ? 7 : 6))
    shown.fail("isn't a tensor");
  const auto& arguments = tensor->arguments();

  // ("storage", class, key, device, elements)
  if (!arguments[0]->is(pickle::kPersistent) || !arguments[0]->items[0]->is(pickle::kTuple) ||
      arguments[0]->items[0]->items.size() < 5)
    shown.fail("has no storage");
  const auto& storage = arguments[0]->items[0]->items;
  if (!storage[1]->is(pickle::kClass) || !storage[2]->is(pickle::kString) ||
      !arguments[1]->is(pickle::kInteger))
    shown.fail("has an invalid storage");
  const std::string& type_name = v3 ? arguments[6]->text : storage[1]->text;
  if (!type_name.starts_with("torch.")) shown.fail("has no dtype");
  const auto type = v3 ? dtype_of(type_name.substr(6)) : dtype_of_storage(type_name.substr(6));
  if (!type) shown.fail(formatted("has the unknown dtype \"{}\"", type_name));

  StoredTensor found{*type, numbers(*arguments[2], shown), numbers(*arguments[3], shown), 0};
  if (found.sizes.size() != found.strides.size())
    shown.fail("has a different number of strides than sizes");
  const auto data = archive.need("data/" + storage[2]->text);
  const auto element = static_cast<int64_t>(c10::elementSize(*type));
  const int64_t first = arguments[1]->integer, held = data.size / element;
  const Extent extent = extent_of(found.sizes, found.strides, shown);
  if (first < 0 || first > held || extent.span > held - first)
    shown.fail("is larger than its storage");
  // torch.distributed.checkpoint copies such tensors before it saves them. Whoever reads one would
  // need memory and disk space beyond any multiple of the file.
  if (extent.count > held)
    shown.fail(formatted("has {} elements in a storage of {}: its strides repeat them",
                         extent.count, held));
  found.offset = data.offset + first * element;
  return found;
}

pickle::Ref read_value(const files::Input& file, const ItemPlace& place, const std::string& where) {
  const ArchiveReader archive(file, place.offset, place.length, where);
  const auto text = archive.read(archive.need("data.pkl"), kLargestPickle);
  return pickle::read(text, file.path().string() + ": " + where, allowed_in_item);
}

void read_part(const files::Input& file, const StoredTensor& tensor,
               const std::vector<int64_t>& from, const at::Tensor& into, HostBlocks& blocks) {
  if (into.numel() == 0) return;
  int64_t first = 0, span = 1, widest = -1;
  bool same_order = into.is_cpu() && into.scalar_type() == tensor.dtype;
  for (int64_t d = 0; d < into.dim(); ++d) {
    const int64_t stride = tensor.strides[static_cast<size_t>(d)];
    first += from[static_cast<size_t>(d)] * stride;
    if (into.size(d) == 1) continue;
    span += (into.size(d) - 1) * stride;
    same_order &= into.stride(d) == stride;
    if (widest < 0 || stride > tensor.strides[static_cast<size_t>(widest)]) widest = d;
  }
  const auto element = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  const int64_t begin = tensor.offset + first * element, bytes = span * element;
  if (same_order && span == into.numel())
    return read_bytes(file, begin, static_cast<char*>(into.data_ptr()), bytes);

  const bool dense = span <= 2 * into.numel();
  if (widest < 0 || bytes <= kSmallRead || (dense && bytes <= HostBlocks::kBytes)) {
    const at::Tensor block = blocks.next(into.device()).narrow(0, 0, bytes);
    read_bytes(file, begin, static_cast<char*>(block.data_ptr()), bytes);
    into.copy_(block.view(tensor.dtype).as_strided(into.sizes(), tensor.strides),
               /*non_blocking=*/true);
    return blocks.copying(into.device());
  }
  // Split into halves until they are dense and small enough, or only rows are left.
  const int64_t half = into.size(widest) / 2;
  read_part(file, tensor, from, into.narrow(widest, 0, half), blocks);
  std::vector<int64_t> behind = from;
  behind[static_cast<size_t>(widest)] += half;
  read_part(file, tensor, behind, into.narrow(widest, half, into.size(widest) - half), blocks);
}

}  // namespace fsdp::checkpoint
