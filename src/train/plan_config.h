// Turns a run's config into a plan of the model, sharding and step that `fsdp train` would use.
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
  int64_t tokens_per_sample = 0;  // on a rank, which may share samples; 1 if they aren't text
  // Bytes per rank of a checkpoint of adapters. nullopt: all parameters are saved.
  std::optional<double> adapters_saved = {};
};

// For `world` ranks, `ranks_per_node` per host; without `gpu`, for CPUs. Reads no data.
ConfigPlan plan_of(const Config& config, int world, std::optional<Gpu> gpu, int ranks_per_node = 8);

// The same with micro-batches of one sequence, in which a sample of the plan is this many tokens of
// it: the largest batch that fits is then the longest sequence.
constexpr int64_t kSequencePart = 1024;
ConfigPlan plan_of_sequences(const Config& config, int world, Gpu gpu, int ranks_per_node = 8);

// The known GPU with that name and the closest memory size, with the device's own memory size;
// nullopt for the CPU.
std::optional<Gpu> gpu_of(at::Device device);

// Sets what is recomputed or offloaded, and in which blocks.
void set_recompute(PlanOptions& options, const memory::ActivationsConfig& activations);
// The mode that would set this.
memory::ActivationsMode activations_mode(const PlanRecompute& recompute);

// The settings of `fsdp train` that a survey tries.
SurveyOptions survey_options();

}  // namespace fsdp::train
