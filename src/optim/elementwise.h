// AdamW's update of the pieces of any optimizer that has it for some parameters.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "fsdp/optim.h"
#include "kernels/update.h"

namespace fsdp::optim {

// An Error that names the field and its value.
void check_adamw(const char* who, std::pair<double, double> betas, double eps);

// What Optimizer::prepare() returns, for pieces with two states each. `how`: without lr, decay and
// step, which the pieces have.
std::function<void()> adamw_work(const Optimizer::Update& what,
                                 const std::vector<Optimizer::Group>& groups,
                                 kernels::AdamWStep how);

}  // namespace fsdp::optim
