// A whole checkpoint as one file for torch.load (also with weights_only=True), as torch.save would
// write it.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/stream.h"

namespace fsdp::checkpoint {

struct TorchFileOptions {
  bool model_only = false;  // only what is below "model", as model.load_state_dict takes it
  std::optional<at::ScalarType> dtype = {};  // for the model's floating-point tensors; none: keep
};

// The contents and nesting of the file: {"model": {…}, "optim": {…}, "extra": {…}} for a checkpoint
// of ours, as torch's own dcp_to_torch_save makes it.
class TorchFile {
 public:
  // Reads everything but the tensors' elements. An Error if names contradict each other or a list
  // index is invalid.
  TorchFile(Source& source, const TorchFileOptions& options);

  int64_t bytes() const;  // of tensors; those that share their bytes are written once
  // Names of values of unsupported Python types. They aren't in the file.
  const std::vector<std::string>& left_out() const { return left_out_; }
  void write(const std::filesystem::path& path, const Advance& advance) const;  // durable

 private:
  Source& source_;
  std::string pickled_;
  std::vector<Copied> storages_;  // `to` is the storage's key
  std::vector<std::string> left_out_;
};

}  // namespace fsdp::checkpoint
