// Source: an existing checkpoint, to be read from: of torch.distributed.checkpoint, or a directory
// of Hugging Face's, whose tensors are then named "model.<name>".
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/manifest.h"
#include "checkpoint/metadata.h"
#include "checkpoint/parts.h"
#include "fsdp/checkpoint.h"

namespace fsdp::checkpoint {

class Source {
 public:
  explicit Source(const std::filesystem::path& dir);

  const std::filesystem::path& dir() const { return dir_; }
  const Metadata& metadata() const { return metadata_; }
  // What the files sum up to: all that is read is checked against it. None where Python wrote it.
  const std::optional<Manifest>& manifest() const { return manifest_; }
  const TensorEntry* tensor(const std::string& name) const;  // null: none of that name

  // An Error unless the files that hold this rectangle of the tensor are there, long enough, and
  // cover all of it.
  void check(const std::string& name, const Rectangle& wanted);
  // Fills the part's memory with its rectangle of the tensor.
  void read(const std::string& name, const Part& part);
  at::Tensor read_whole(const std::string& name);

  // A plain value, if it is of a kind that Value has.
  std::optional<Value> value(const std::string& name);
  // The same as it was pickled; null if it is of a class that is not known here.
  pickle::Ref plain(const std::string& name);

 private:
  void open_hugging_face();
  const files::Input& file(const std::string& name);
  const StoredTensor& stored(const std::string& name, const StoredChunk& chunk,
                             const TensorEntry& entry);

  std::filesystem::path dir_;
  std::optional<Manifest> manifest_;  // before the files, which point into it
  Metadata metadata_;
  std::map<std::string, std::unique_ptr<files::Input>> files_;
  std::map<std::pair<std::string, int64_t>, StoredTensor> stored_;  // by file and offset
  std::set<std::string> covered_;  // names whose parts were found to make up the whole
  HostBlocks blocks_;
};

// What was saved under "extra.": of the run, and of one rank. Names of values that are of no kind
// that Value has are added to `skipped`.
struct Extras {
  Extra run, rank;
};
Extras read_extras(Source& source, int rank, std::vector<std::string>* skipped);

}  // namespace fsdp::checkpoint
