// A small checkpoint assembled by hand, for tests of code that inspects checkpoints.
#pragma once

#include <ATen/ATen.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>

#include "checkpoint/manifest.h"
#include "checkpoint/metadata.h"
#include "checkpoint/test_files.h"

namespace fsdp::checkpoint {

// Writes tensors, split by rows into two files, and values; finish() writes the metadata.
class Made {
 public:
  explicit Made(const std::filesystem::path& dir) : dir_(dir) {
    std::filesystem::create_directory(dir);
    for (int rank : {0, 1}) outs_.push_back(std::make_unique<files::Output>(dir / name(rank)));
  }

  static std::string name(int rank) { return "__" + std::to_string(rank) + "_0.distcp"; }

  // The first `rows` rows in file 0, the others in file 1; under each of the names.
  Made& tensor(const std::vector<KeyPath>& paths, const at::Tensor& tensor, int64_t rows) {
    const int64_t all = tensor.size(0);
    for (const auto& [rank, begin, end] :
         {std::tuple{size_t{0}, int64_t{0}, rows}, std::tuple{size_t{1}, rows, all}}) {
      if (begin == end) continue;
      const at::Tensor part = tensor.narrow(0, begin, end - begin).contiguous();
      const ItemPlace place = write_tensor(*outs_[rank], part);
      Rectangle rectangle{std::vector<int64_t>(part.dim(), 0), part.sizes().vec()};
      rectangle.offsets[0] = begin;
      for (const auto& path : paths)
        metadata.add_chunk(path, tensor.scalar_type(), tensor.sizes().vec(), {rectangle, place});
    }
    return *this;
  }
  Made& value(const KeyPath& path, int64_t value) {
    metadata.add_value(path, write_value(*outs_[0], [&](auto& writer) { writer.integer(value); }));
    return *this;
  }

  void finish(bool with_manifest) {
    Manifest manifest;
    for (int rank : {0, 1}) manifest.files[name(rank)] = outs_[static_cast<size_t>(rank)]->close();
    if (with_manifest) metadata.mark = mark_of(manifest);
    files::Output list(dir_ / ".metadata");
    list.append(encode(metadata));
    manifest.files[".metadata"] = list.close();
    if (with_manifest) write_manifest(dir_, manifest);
  }

  Metadata metadata;

 private:
  std::filesystem::path dir_;
  std::vector<std::unique_ptr<files::Output>> outs_;
};

inline void flip(const std::filesystem::path& path, int64_t at) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekg(at);
  const int byte = file.get();
  file.seekp(at);
  file.put(static_cast<char>(byte ^ 0x10));
}

}  // namespace fsdp::checkpoint
