// The adapters in what `fsdp ckpt export` reads: a checkpoint of a run with [lora], or PEFT's
// directory.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "checkpoint/stream.h"
#include "cli/ckpt_source.h"
#include "models/peft.h"

namespace fsdp::cli {

// The config of adapters and where their base is. nullopt: it has none.
std::optional<models::PeftConfig> adapters_of(const CheckpointSource& from);

// Throws an Error unless every adapter is whole and fits a matrix of `model`.
void check_adapters(const CheckpointSource& adapters, const models::PeftConfig& config,
                    const models::AnyConfig& model);

// The adapters' tensors, by PEFT's names.
std::vector<checkpoint::Copied> peft_tensors(const CheckpointSource& adapters,
                                             at::ScalarType dtype);

// Adds scale · B A to those of `tensors` that have an adapter, while they are copied from `base`, a
// `model`. If the run had a quantised base, all its linears get the numbers that the run computed
// with.
void merge_adapters(std::vector<checkpoint::Copied>& tensors, const CheckpointSource& base,
                    const models::AnyConfig& model, const CheckpointSource& adapters,
                    const models::PeftConfig& config);

}  // namespace fsdp::cli
