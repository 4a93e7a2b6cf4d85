// When memory runs out: an error that says what held it and what would help.
//
//   try {
//     loss.backward();
//   } catch (const std::exception& problem) {
//     if (fsdp::is_out_of_memory(problem))
//       throw fsdp::explain_out_of_memory(sharded, problem, model, options);
//     throw;
//   }
#pragma once

#include <exception>

#include "fsdp/error.h"
#include "fsdp/fully_shard.h"
#include "fsdp/plan.h"

namespace fsdp {

// Of a GPU's allocator or the CPU's.
bool is_out_of_memory(const std::exception& problem);

// What the engine holds by kind; with a `model` (as for plan()) also what the plan of `options`
// says, and the three changes that would save the most, each with its plan. Takes some dry runs,
// allocates nothing on the device, and never throws.
Error explain_out_of_memory(const Sharded& sharded, const std::exception& problem,
                            const PlanModel& model = {}, const PlanOptions& options = {});

}  // namespace fsdp
