// A whole checkpoint as one file for torch.load (also with weights_only=True): what torch.save
// would write of it.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/stream.h"

namespace fsdp::checkpoint {

struct TorchFileOptions {
  bool model_only = false;  // what is below "model", as model.load_state_dict takes it
  std::optional<at::ScalarType> dtype = {};  // of the model's floating-point tensors; none: theirs
};

// What is going to be written, and in which nesting: {"model": {…}, "optim": {…}, "extra": {…}} of
// a checkpoint of ours, as torch's own dcp_to_torch_save makes it.
class TorchFile {
 public:
  // Everything but the tensors' elements is read here. An Error where the names contradict each
  // other, or a list has holes.
  TorchFile(Source& source, const TorchFileOptions& options);

  int64_t bytes() const;  // of tensors; those that share their bytes are written once
  // Names of values whose Python types are not known here. They are not in the file.
  const std::vector<std::string>& left_out() const { return left_out_; }
  void write(const std::filesystem::path& path, const Advance& advance) const;  // to the disk

 private:
  Source& source_;
  std::string pickled_;
  std::vector<Copied> storages_;  // `to` is the storage's key
  std::vector<std::string> left_out_;
};

}  // namespace fsdp::checkpoint
