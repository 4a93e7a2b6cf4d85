// Source: an existing checkpoint, to be read from.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/metadata.h"
#include "checkpoint/parts.h"
#include "fsdp/checkpoint.h"

namespace fsdp::checkpoint {

class Source {
 public:
  explicit Source(const std::filesystem::path& dir);

  const std::filesystem::path& dir() const { return dir_; }
  const Metadata& metadata() const { return metadata_; }
  const TensorEntry* tensor(const std::string& name) const;  // null: none of that name

  // An Error unless the files that hold this rectangle of the tensor are there, long enough, and
  // cover all of it.
  void check(const std::string& name, const Rectangle& wanted);
  // Fills the part's memory with its rectangle of the tensor.
  void read(const std::string& name, const Part& part);
  at::Tensor read_whole(const std::string& name);

  // A plain value, if it is of a kind that Value has.
  std::optional<Value> value(const std::string& name);

 private:
  const files::Input& file(const std::string& name);
  const StoredTensor& stored(const std::string& name, const StoredChunk& chunk,
                             const TensorEntry& entry);

  std::filesystem::path dir_;
  Metadata metadata_;
  std::map<std::string, std::unique_ptr<files::Input>> files_;
  std::map<std::pair<std::string, int64_t>, StoredTensor> stored_;  // by file and offset
};

// What was saved under "extra.": of the run, and of one rank. Names of values that are of no kind
// that Value has are added to `skipped`.
struct Extras {
  Extra run, rank;
};
Extras read_extras(Source& source, int rank, std::vector<std::string>* skipped);

}  // namespace fsdp::checkpoint
