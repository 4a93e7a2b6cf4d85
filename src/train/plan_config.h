// Plans of a run's config: the model, sharding and step that `fsdp train` would take with it.
#pragma once

#include <optional>
#include <string>

#include "fsdp/plan.h"
#include "train/config.h"

namespace fsdp::train {

struct ConfigPlan {
  PlanModel model;
  PlanOptions options;
  std::string title;              // "Llama, 8.03B parameters, computed in bf16"
  int64_t tokens_per_sample = 0;  // 1 where samples are no text
};

// For `world` ranks, `ranks_per_node` of them on a host. Without a GPU as a CPU would run it. No
// data is read: a vocabulary that only a tokenizer knows is an Error.
ConfigPlan plan_of(const Config& config, int world, std::optional<Gpu> gpu, int ranks_per_node = 8);

// The GPU of that name whose memory is nearest, with this one's memory; none for a CPU.
std::optional<Gpu> gpu_of(at::Device device);

// What is not kept for backward, and of which blocks.
void set_recompute(PlanOptions& options, const ActivationsConfig& activations);

// What can be chosen for it: settings that `fsdp train` takes.
SurveyOptions survey_options();

}  // namespace fsdp::train
