// Items: what torch.save writes for one tensor or one plain value. A checkpoint's file is a
// sequence of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "checkpoint/files.h"
#include "checkpoint/host_blocks.h"
#include "checkpoint/pickle.h"
#include "fsdp/checkpoint.h"
#include "fsdp/shard_info.h"

namespace fsdp::checkpoint {

struct ItemPlace {  // of an item
  std::string file;
  int64_t offset = 0;
  int64_t length = 0;
};

// Passes bytes on to `use` in pieces.
using Bytes = std::function<void(const std::function<void(const void* bytes, size_t size)>& use)>;

// Appends a tensor of the type, sizes and strides of `like`, which must be dense in some order of
// its dimensions; `bytes` passes on its elements in memory order. Returns its place.
ItemPlace write_tensor(files::Output& out, const at::Tensor& like, const Bytes& bytes);
ItemPlace write_tensor(files::Output& out, const at::Tensor& tensor);

// Appends a plain value; `put` writes it.
ItemPlace write_value(files::Output& out, const std::function<void(pickle::Writer&)>& put);
void put_value(pickle::Writer& writer, const Value& value);  // not a tensor

// Writes a tensor as torch.save does: its elements are the whole record "data/KEY".
void put_tensor(pickle::Writer& writer, at::ScalarType dtype, at::IntArrayRef sizes,
                at::IntArrayRef strides, const std::string& key);

struct StoredTensor {  // a tensor in a file
  at::ScalarType dtype;
  std::vector<int64_t> sizes, strides;  // in elements
  int64_t offset;                       // of its first element in the file, in bytes
};

// Reads the description of an item, without its elements. `where` names it in errors.
StoredTensor find_tensor(const files::Input& file, const ItemPlace& place,
                         const std::string& where);
pickle::Ref read_value(const files::Input& file, const ItemPlace& place, const std::string& where);

// Reads the part of a stored tensor that starts at `from` into `into`, which has the part's sizes.
// Reads only the bytes of that part (or little more if it is scattered): straight into place if
// type and order match, else through `blocks`. Copies to a device are queued on its current stream.
void read_part(const files::Input& file, const StoredTensor& tensor,
               const std::vector<int64_t>& from, const at::Tensor& into, HostBlocks& blocks);

}  // namespace fsdp::checkpoint
