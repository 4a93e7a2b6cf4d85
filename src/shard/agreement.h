// What ranks must agree on before a model is sharded: its parameters, and their values.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/world.h"
#include "shard/plan.h"

namespace fsdp::shard {

// Throws unless every rank shards the same parameters: ranks with different models would take each
// other's bytes for something else.
void compare_plans(const World& world, const std::vector<PlannedUnit>& planned);

// Where the values of parameters and buffers come from.
class InitialValues {
 public:
  // `broadcast`: from rank 0. Otherwise from each rank, and compare() looks for differences.
  InitialValues(const World& world, bool broadcast) : world_(world), broadcast_(broadcast) {}

  // The full value of a parameter or buffer that this rank shall have; undefined on meta.
  at::Tensor value(const std::string& name, const at::Tensor& tensor);
  // Draws this rank's part of a parameter into `part` instead (1-d, elements from `first` on), if
  // its values are nothing but random. False: use value().
  bool draw(const std::string& name, const at::Tensor& tensor, const at::Tensor& part,
            int64_t first);
  void compare() const;  // warns if ranks built different models

 private:
  const World& world_;
  const bool broadcast_;
  std::vector<std::string> names_;
  std::vector<int64_t> checksums_;
};

}  // namespace fsdp::shard
