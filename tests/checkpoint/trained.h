// A sharded model with its optimizer, trained for a few steps, and its contents as full tensors.
// The engine gathers them, so nothing here goes through the code under test.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>

#include "fsdp/checkpoint.h"
#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "shard/models.h"

namespace fsdp::testing {

enum class Rule { kAdamW, kSgdWithMomentum, kSgd, kMuon };

struct Trained {
  const ModelCase* model;
  Built built;
  Sharded sharded;
  std::unique_ptr<Optimizer> optimizer;
  int steps = 0;

  void train(int count);
};

Trained make_trained(const std::string& model_case, ShardOptions options, Rule rule = Rule::kAdamW,
                     uint64_t seed = 7);

// "model.<name>" of every parameter and buffer, "state.<name>.<state>" and "steps.<name>" of every
// parameter that has been updated. Collective.
using Snapshot = std::map<std::string, at::Tensor>;
Snapshot snapshot(const Trained& trained);
void expect_equal(const Snapshot& actual, const Snapshot& expected);  // bit for bit

void write_snapshot(const std::filesystem::path& file, const Snapshot& snapshot);
Snapshot read_snapshot(const std::filesystem::path& file);

// A temporary directory that all ranks share. Collective.
class SharedFolder {
 public:
  SharedFolder();
  ~SharedFolder();
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path made_, path_;
};

}  // namespace fsdp::testing
