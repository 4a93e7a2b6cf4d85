// Plan: assigns parameters to units, before anything is changed.
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
  std::vector<Parameter> parameters;  // each once, with all of its names
  std::vector<ModuleTree*> tops;
};

// The units of `trees`, in module order, the root last; several trees have one common root unit.
// Parameters that are already sharded or ignored are left out. A parameter that two units share
// goes to the unit above both.
std::vector<PlannedUnit> plan_units(std::vector<ModuleTree*> trees, const ShardOptions& options);

// A warning for everything the policy looks for that no module has.
std::vector<std::string> unmatched(const std::vector<ModuleTree*>& trees, const WrapPolicy& policy);

// Every parameter of the trees, in order, with all of its names.
std::vector<std::pair<at::Tensor, std::vector<std::string>>> names_of(
    const std::vector<ModuleTree*>& trees);

}  // namespace fsdp::shard
