// Plan: which parameters make which unit, before anything is changed.
#pragma once

#include <string>
#include <unordered_set>
#include <vector>

#include "fsdp/fully_shard.h"
#include "shard/flat.h"
#include "shard/tree.h"

namespace fsdp::shard {

struct PlannedUnit {
  std::string name;
  bool root = false;
  UnitOptions options;
  std::vector<Parameter> parameters;  // each once, with all its names
  std::vector<ModuleTree*> tops;
};

// Units of `trees` (one unit of several roots where there are several), in the order of the
// modules, the root last. Parameters that are sharded already or ignored are left out; a parameter
// that two units share goes to the unit above both.
std::vector<PlannedUnit> plan_units(std::vector<ModuleTree*> trees, const ShardOptions& options);

// Names of every parameter in the trees by its tensor, in order.
std::vector<std::pair<at::Tensor, std::vector<std::string>>> names_of(
    const std::vector<ModuleTree*>& trees);

}  // namespace fsdp::shard
