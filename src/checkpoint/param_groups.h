// The numbers an optimizer works with, as torch.optim's state_dict has them: a list of groups.
#pragma once

#include <functional>
#include <vector>

#include "checkpoint/metadata.h"
#include "checkpoint/pickle.h"
#include "fsdp/optim.h"

namespace fsdp::checkpoint {

struct PlainValue {
  KeyPath path;  // ("optim", "param_groups", 0, "lr")
  std::function<void(pickle::Writer&)> put;
};

// With all keys that torch's optimizer of the same name has. Groups without parameters are left
// out: nobody makes such a group there.
std::vector<PlainValue> param_groups(const Optimizer& optimizer);

}  // namespace fsdp::checkpoint
