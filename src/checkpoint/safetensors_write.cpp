#include "checkpoint/safetensors_write.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/format.h"
#include "checkpoint/hugging_face.h"

namespace fsdp::checkpoint {
namespace {

std::string shard_name(size_t number, size_t of) {
  return formatted("model-{:05}-of-{:05}.safetensors", number, of);
}

// Groups consecutive tensors into shards of at most `most` bytes; a larger tensor is alone.
std::vector<std::vector<Copied>> shards_of(const Source& source, const std::vector<Copied>& tensors,
                                           int64_t most) {
  std::vector<std::vector<Copied>> shards(1);
  int64_t held = 0;
  for (const auto& tensor : tensors) {
    const int64_t bytes = bytes_of(source, tensor);
    if (!shards.back().empty() && bytes > most - held) {
      shards.emplace_back();
      held = 0;
    }
    shards.back().push_back(tensor);
    held += bytes;
  }
  return shards;
}

void check_amount_of(Source& source, const std::vector<Copied>& tensors) {
  std::vector<std::string> names;  // each once, in their order: parts of one come together
  for (const auto& tensor : tensors)
    if (names.empty() || names.back() != tensor.from) names.push_back(tensor.from);
  check_amount(source, names);
}

}  // namespace

void write_safetensors(Source& source, const std::filesystem::path& path,
                       std::vector<Copied> tensors, const SafeMetadata& metadata,
                       const Advance& advance) {
  check_amount_of(source, tensors);
  std::stable_sort(tensors.begin(), tensors.end(), [](const Copied& a, const Copied& b) {
    return c10::elementSize(a.dtype) > c10::elementSize(b.dtype);
  });
  const int64_t total = bytes_of(source, tensors);
  std::vector<SafeTensor> listed;
  int64_t position = 0;
  for (const auto& tensor : tensors) {
    const int64_t end = position + bytes_of(source, tensor);
    listed.push_back({tensor.to, tensor.dtype, sizes_of(source, tensor), position, end});
    position = end;
  }
  const std::string header = encode_header(listed, metadata);
  files::Output out(path, static_cast<int64_t>(header.size()) + total);
  out.append(header);
  for (const auto& tensor : tensors)
    stream_bytes(
        source, tensor, [&](const void* bytes, size_t size) { out.append(bytes, size); }, advance);
  out.close();
}

void write_safetensors_shards(Source& source, const std::filesystem::path& dir,
                              const std::vector<Copied>& tensors, int64_t most,
                              const SafeMetadata& metadata, const Advance& advance) {
  check_amount_of(source, tensors);
  const int64_t total = bytes_of(source, tensors);
  const auto shards = shards_of(source, tensors, most);
  if (shards.size() == 1)
    return write_safetensors(source, dir / kWeightsFile, tensors, metadata, advance);
  nlohmann::ordered_json index;
  index["metadata"]["total_size"] = total;
  nlohmann::json files;  // sorted by name
  for (size_t i = 0; i < shards.size(); ++i) {
    const std::string name = shard_name(i + 1, shards.size());
    write_safetensors(source, dir / name, shards[i], metadata, advance);
    for (const auto& tensor : shards[i]) files[tensor.to] = name;
  }
  index["weight_map"] = files;
  files::write_whole(dir / kWeightsIndex, index.dump(2) + "\n");
}

bool is_safetensors_shard(const std::string& name) {
  if (name == kWeightsFile || name == kWeightsIndex) return true;
  size_t number = 0, of = 0;
  return std::sscanf(name.c_str(), "model-%5zu-of-%5zu.safetensors", &number, &of) == 2 &&
         name == shard_name(number, of);
}

}  // namespace fsdp::checkpoint
