// How gradients leave autograd: a hook on every parameter hands them to the model.
#pragma once

#include <memory>

#include "shard/unit.h"

namespace fsdp::shard {

// Installs the hook. A post-accumulate hook the user set before runs first.
void watch_gradient(const std::shared_ptr<Unit>& unit, size_t flat, size_t parameter);

// Call this before anything but a reduction writes to Flat::grad. An Error if the gradient was
// already used by a step in backward.
void change_gradient(Flat& flat);

}  // namespace fsdp::shard
