// An optimizer's hyperparameters in the format of torch.optim's state_dict: a list of groups.
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

// Has all keys of torch's optimizer of the same name. Groups without parameters are left out, since
// torch has none.
std::vector<PlainValue> param_groups(const Optimizer& optimizer);

}  // namespace fsdp::checkpoint
