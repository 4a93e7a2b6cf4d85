#include "checkpoint/import.h"

#include <ATen/ops/empty.h>

#include "checkpoint/folder.h"
#include "checkpoint/manifest.h"
#include "fsdp/error.h"

namespace fsdp::checkpoint {
namespace {

constexpr const char* kFile = "__0_0.distcp";

void write_extra(Metadata& metadata, files::Output& out, const Extra& extra) {
  for (const auto& [key, value] : extra) {
    const KeyPath path{std::string("extra"), key};
    if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
      const Part part = whole(tensor->contiguous());
      metadata.add_chunk(path, tensor->scalar_type(), tensor->sizes().vec(),
                         {part.rectangle, write_tensor(out, part.memory)});
      continue;
    }
    const auto put = [&value = value](pickle::Writer& writer) { put_value(writer, value); };
    metadata.add_value(path, write_value(out, put));
  }
}

void write_parameter(Metadata& metadata, files::Output& out, Source& source, const Imported& tensor,
                     const Advance& advance) {
  const std::vector<int64_t>& sizes = source.metadata().tensors.at(tensor.from).sizes;
  const auto write = [&](const Part& part) {
    const ItemPlace place = write_tensor(out, part.memory);
    for (const auto& name : tensor.names)
      metadata.add_chunk({std::string("model"), name}, tensor.dtype, sizes,
                         {part.rectangle, place});
    if (advance) advance(static_cast<int64_t>(part.memory.nbytes()));
  };
  stream(source, tensor.from, tensor.dtype, write);
  if (count_of(sizes) == 0)  // listed even without elements
    write(whole(at::empty(sizes, at::TensorOptions().dtype(tensor.dtype))));
}

}  // namespace

void import_checkpoint(Source& source, const std::filesystem::path& dir,
                       const std::vector<Imported>& tensors, const Extra& extra,
                       const Advance& advance) {
  // It isn't a step of the run in this folder, so `latest` doesn't move.
  const Partial draft{.dir = checked_name(dir), .writer = new_writer(), .newest = false};
  begin_partial(draft);
  const auto partial = draft.path();
  try {
    Metadata metadata;
    Manifest manifest;
    files::Output out(partial / kFile);
    write_extra(metadata, out, extra);
    for (const auto& tensor : tensors) write_parameter(metadata, out, source, tensor, advance);
    manifest.files[kFile] = out.close();
    metadata.mark = mark_of(manifest);
    manifest.files[kMetadataName] = files::write_whole(partial / kMetadataName, encode(metadata));
    write_manifest(partial, manifest);
    publish_partial(draft);
  } catch (...) {
    drop_partial(draft);
    throw;
  }
}

}  // namespace fsdp::checkpoint
