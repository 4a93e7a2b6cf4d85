// The configs of configs/, embedded in the library by cmake/EmbedConfigs.cmake, so that
// `fsdp train llama-1b` works wherever the binary is.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "train/config.h"

namespace fsdp::train {

struct ReadyConfig {
  std::string_view name;  // "llama-1b", "bench/llama-953m"
  std::string_view text;  // TOML
};

const std::vector<ReadyConfig>& ready_configs();  // by name; generated
const ReadyConfig* ready_config(std::string_view name);

// The first line of the config, a comment that says what it is.
std::string title(const ReadyConfig& config);

// Parameters of the model; nullopt if only the tokenizer knows the vocabulary size.
std::optional<int64_t> parameter_count(const Config& config);

// `fsdp train --list-configs`: name, parameters and title in columns.
std::string list_ready_configs();

}  // namespace fsdp::train
