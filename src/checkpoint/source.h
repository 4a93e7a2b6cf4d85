// Source: an existing checkpoint to read from. Either one of torch.distributed.checkpoint, or a
// Hugging Face directory. The tensors of a directory, and those of a checkpoint that is a model's
// state dict and nothing else, are named "model.<name>" here.
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
  // The checksums of the files; all reads are checked against them. Python writes none.
  const std::optional<Manifest>& manifest() const { return manifest_; }
  const TensorEntry* tensor(const std::string& name) const;  // null: none of that name
  bool is_state_dict() const { return is_state_dict_; }      // of a model and nothing else
  bool is_unchecked() const { return is_unchecked_; }        // a checkpoint without sums

  // From here on check() notes the files it would look into, which may be missing.
  void only_note_files(std::set<std::string>* into) { noted_ = into; }
  // An Error unless the files that hold this rectangle exist, are long enough, and the tensor's
  // parts cover all of it.
  void check(const std::string& name, const Rectangle& wanted);
  int64_t bytes_of_file(const std::string& name) { return file(name).size(); }
  // Fills the part's memory with its rectangle of the tensor.
  void read(const std::string& name, const Part& part);
  at::Tensor read_whole(const std::string& name);

  // A plain value; nullopt if its type isn't one of Value's.
  std::optional<Value> value(const std::string& name);
  // The same as it was pickled; null if its class is unknown.
  pickle::Ref plain(const std::string& name);

 private:
  void open_hugging_face();
  void name_wrapped();
  void name_state_dict();
  const files::Input& file(const std::string& name);
  const StoredTensor& stored(const std::string& name, const StoredChunk& chunk,
                             const TensorEntry& entry);

  std::filesystem::path dir_;
  std::optional<Manifest> manifest_;  // before the files, which point into it
  Metadata metadata_;
  bool is_state_dict_ = false, is_unchecked_ = false;
  std::map<std::string, std::unique_ptr<files::Input>> files_;
  std::map<std::pair<std::string, int64_t>, StoredTensor> stored_;  // by file and offset
  std::set<std::string> covered_;  // names whose parts were checked
  std::set<std::string>* noted_ = nullptr;
  HostBlocks blocks_;
};

// The values saved under "extra.": those of the run and those of one rank. Names of values whose
// type isn't one of Value's are added to `skipped`.
struct Extras {
  Extra run, rank;
};
Extras read_extras(Source& source, int rank, std::vector<std::string>* skipped);

}  // namespace fsdp::checkpoint
