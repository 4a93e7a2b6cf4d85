// Configurations as Hugging Face's transformers write them (config.json), read and written.
//
//   models::AnyConfig config = models::read_hugging_face_config("SmolLM2-135M/config.json");
//   if (auto* llama = std::get_if<models::LlamaConfig>(&config)) models::Llama model(*llama);
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "fsdp/models/gpt2.h"
#include "fsdp/models/llama.h"

namespace fsdp::models {

using AnyConfig = std::variant<LlamaConfig, GPT2Config>;  // Qwen2 is a Llama with qkv_bias

// The model that a config.json describes (llama, qwen2 or gpt2). All that changes what the model
// computes is taken over, or it is an Error that names it. `where` is the file's name.
AnyConfig parse_hugging_face_config(std::string_view json, const std::string& where);
AnyConfig read_hugging_face_config(const std::filesystem::path& file);

struct SpecialTokens {
  std::optional<int64_t> bos, eos;
};

// The text of a config.json with which transformers (4 and 5) makes the same model. `dtype` is that
// of the weights ("float32", "bfloat16"), `max_positions` the longest sequence; 0: the model's own
// for a GPT-2, else what transformers takes by itself.
std::string hugging_face_config(const AnyConfig& config, const std::string& dtype,
                                int64_t max_positions = 0, const SpecialTokens& tokens = {});

}  // namespace fsdp::models
