// The check in every call that takes a sharded model and its optimizer.
#pragma once

#include <memory>
#include <string>

#include "base/format.h"
#include "fsdp/error.h"
#include "fsdp/optim.h"
#include "optim/states.h"
#include "shard/model.h"

namespace fsdp::checkpoint {

// Throws if there is an optimizer and it belongs to another model. `call` names the caller.
inline void require_same_model(const std::shared_ptr<shard::Model>& model,
                               const Optimizer* optimizer, const std::string& call) {
  if (optimizer && shard::live(optim::states_of(*optimizer).model()) != model)
    throw Error(formatted("{}: the optimizer belongs to another model.", call),
                "make the optimizer from the same sharded model.");
}

}  // namespace fsdp::checkpoint
