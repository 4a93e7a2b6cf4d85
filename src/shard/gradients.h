// How gradients leave autograd: a hook on every parameter that hands them to the model.
#pragma once

#include <memory>

#include "shard/unit.h"

namespace fsdp::shard {

// Installs the hook; one that the user set before runs first.
void watch_gradient(const std::shared_ptr<Unit>& unit, size_t flat, size_t parameter);

// To be called before anything but a reduction writes to Flat::grad.
void change_gradient(Flat& flat);

}  // namespace fsdp::shard
