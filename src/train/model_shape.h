// Converts the model section of a run's config to the models' own configs and back.
#pragma once

#include <cstdint>
#include <filesystem>

#include "fsdp/checkpoint.h"
#include "fsdp/models/hugging_face.h"
#include "train/config.h"

namespace fsdp::train {

// The language model of a config. `vocab`: the tokenizer's size, used if model.vocab is 0. Throws
// Error for an mlp.
models::AnyConfig model_shape(const Config& config, int64_t vocab = 0);

// Sets the model section to this model.
void set_model_shape(models::ModelConfig& model, const models::AnyConfig& shape);

// The folder with the config.json of a checkpoint that another program wrote: its own or the one
// above. Empty: there is none.
std::filesystem::path settings_beside(const std::filesystem::path& checkpoint);

// The config of a run, from the extra values of one of its checkpoints; for a checkpoint without
// them, one with the model of the config.json beside it.
Config config_of(const checkpoint::Extra& extra, const std::filesystem::path& checkpoint);

}  // namespace fsdp::train
