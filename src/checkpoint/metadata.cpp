#include "checkpoint/metadata.h"

#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::checkpoint {
namespace {

constexpr int64_t kLargestMetadata = int64_t{4} << 30;  // bytes

}  // namespace

std::string Metadata::name(const KeyPath& path) {
  std::string joined;
  for (const auto& step : path) {
    if (!joined.empty()) joined += '.';
    joined += std::holds_alternative<std::string>(step) ? std::get<std::string>(step)
                                                        : std::to_string(std::get<int64_t>(step));
  }
  return joined;
}

void Metadata::add_chunk(const KeyPath& path, at::ScalarType dtype,
                         const std::vector<int64_t>& sizes, StoredChunk chunk) {
  const std::string key = name(path);
  auto& entry = tensors.try_emplace(key, TensorEntry{dtype, sizes, {}}).first->second;
  entry.chunks.push_back(std::move(chunk));
  paths.emplace(key, path);
}

void Metadata::add_value(const KeyPath& path, ItemPlace place) {
  const std::string key = name(path);
  values[key] = std::move(place);
  paths.emplace(key, path);
}

void Metadata::add(Metadata other) {
  for (auto& [key, theirs] : other.tensors) {
    auto [ours, fresh] = tensors.try_emplace(key, std::move(theirs));
    if (fresh) continue;
    for (auto& chunk : theirs.chunks) ours->second.chunks.push_back(std::move(chunk));
  }
  values.merge(other.values);
  paths.merge(other.paths);
  if (mark.empty()) mark = std::move(other.mark);
}

Metadata read_metadata(const std::filesystem::path& dir) {
  const auto file = dir / kMetadataName;
  std::error_code problem;
  if (!std::filesystem::exists(dir, problem))
    throw Error(formatted("{}: there is no such checkpoint.", dir), "check the path.");
  if (!std::filesystem::exists(file, problem))
    throw Error(
        formatted("{}: is missing, so {} isn't a complete checkpoint.", file, dir),
        "pass the folder of a checkpoint, such as \"step-100\", which holds a file .metadata.");
  return decode(files::read_whole(file, kLargestMetadata), file.string());
}

void check_metadata_size(const std::filesystem::path& file, int64_t bytes) {
  if (bytes > kLargestMetadata)
    throw Error(formatted("{}: has {} bytes; the limit is {}.", file, bytes, kLargestMetadata),
                "the file is damaged; load another checkpoint.");
}

std::string shape_text(const std::vector<int64_t>& sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

}  // namespace fsdp::checkpoint
