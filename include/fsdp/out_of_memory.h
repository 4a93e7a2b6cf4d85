/// @file
/// When memory runs out: an error that says what held it and what would help.
///
///     try {
///       loss.backward();
///     } catch (const std::exception& problem) {
///       if (fsdp::is_out_of_memory(problem))
///         throw fsdp::explain_out_of_memory(sharded, problem, model, options);
///       throw;
///     }
#pragma once

#include <exception>

#include "fsdp/error.h"
#include "fsdp/fully_shard.h"
#include "fsdp/plan.h"

namespace fsdp {

/// Whether an exception comes from the GPU's or the CPU's allocator.
bool is_out_of_memory(const std::exception& problem);

/// An Error with what the engine holds, by kind. With a `model` (as for plan()) also what the plan
/// of `options` needs, and the three changes that would save the most, each with its plan. Makes
/// several dry runs, allocates nothing on the device, and never throws.
Error explain_out_of_memory(const Sharded& sharded, const std::exception& problem,
                            const PlanModel& model = {}, const PlanOptions& options = {});

}  // namespace fsdp
