// Metadata: what a checkpoint holds and where. Its file `.metadata` is a pickle of the class of the
// same name in torch.distributed.checkpoint.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "checkpoint/item.h"
#include "checkpoint/manifest.h"
#include "fsdp/shard_info.h"

namespace fsdp::checkpoint {

struct StoredChunk {  // a rectangle of a tensor
  Rectangle rectangle;
  ItemPlace place;
};

struct TensorEntry {
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
  std::vector<StoredChunk> chunks;
};

// The keys that lead to an entry in the nested dicts and lists that were saved.
using PathKey = std::variant<std::string, int64_t>;
using KeyPath = std::vector<PathKey>;

struct Metadata {
  std::map<std::string, TensorEntry> tensors;
  std::map<std::string, ItemPlace> values;  // plain Python values
  std::map<std::string, KeyPath> paths;
  // mark_of() the manifest that belongs to the checkpoint; "": none does. It is in a field of
  // Python's, save_id, so that nobody can lose the manifest without a trace.
  std::string mark;

  // The keys joined by dots: the name of the entry everywhere else.
  static std::string name(const KeyPath& path);
  void add_chunk(const KeyPath& path, at::ScalarType dtype, const std::vector<int64_t>& sizes,
                 StoredChunk chunk);
  void add_value(const KeyPath& path, ItemPlace place);
  void add(Metadata other);  // another rank's
};

std::string encode(const Metadata& metadata);
// Checks everything: sizes, bounds of chunks, names of files. `where` names the file in errors.
Metadata decode(std::string_view bytes, const std::string& where);

Metadata read_metadata(const std::filesystem::path& dir);
// Throws Error if a `.metadata` of so many bytes is too large to be read.
void check_metadata_size(const std::filesystem::path& file, int64_t bytes);

std::string shape_text(const std::vector<int64_t>& sizes);  // "[4, 3]"

}  // namespace fsdp::checkpoint
