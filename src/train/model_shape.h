// The shape of a model, between a run's config and the models' own configs.
#pragma once

#include <cstdint>
#include <filesystem>

#include "fsdp/checkpoint.h"
#include "fsdp/models/hugging_face.h"
#include "train/config.h"

namespace fsdp::train {

// The language model that a config asks for. `vocab`: the tokenizer's, for where model.vocab is 0.
// An Error for an mlp.
models::AnyConfig model_shape(const Config& config, int64_t vocab = 0);

// Makes model.* of a config ask for this model.
void set_model_shape(ModelConfig& model, const models::AnyConfig& shape);

// The config that a run had, from the extra values of one of its checkpoints.
Config config_of(const checkpoint::Extra& extra, const std::filesystem::path& checkpoint);

}  // namespace fsdp::train
