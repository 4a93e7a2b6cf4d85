// How gradients leave autograd (a hook on every parameter hands them to the model), and what others
// may do with them before an update.
#pragma once

#include <memory>

#include "shard/unit.h"

namespace fsdp::shard {

struct Engine;

// Installs the hook. A post-accumulate hook the user set before runs first.
void watch_gradient(const std::shared_ptr<Unit>& unit, size_t flat, size_t parameter);

// Call this before anything but a reduction writes to Flat::grad. An Error if the gradient was
// already used by a step in backward.
void change_gradient(Flat& flat);

// Flat::grad is what the user expects: without gradients that were cleared, and multiplied by an
// earlier factor.
void settle_gradients(Engine& model);
// Multiplies all gradients by `factor` (one float32): in the next update if our optimizers make it,
// otherwise now.
void scale_gradients(Engine& model, const at::Tensor& factor);
// Makes the next update write nothing unless loss and norm are finite. The device decides, and so
// does every rank, since both are the same on all of them. Returns whether it is skipped, a bool
// [].
at::Tensor skip_unless_finite(Engine& model, const at::Tensor& loss, const at::Tensor& norm);

}  // namespace fsdp::shard
