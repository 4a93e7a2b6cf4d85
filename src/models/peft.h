// adapter_config.json: how PEFT, Hugging Face's library of adapters, describes LoRA.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "nn/config.h"

namespace fsdp::models {

struct PeftConfig {
  nn::LoRAConfig lora;
  std::string base;  // base_model_name_or_path: a directory or a name on the hub; may be empty
  bool transposed = false;  // the base's weights are [in, out], as a GPT-2's
};

// What the text of an adapter_config.json describes. A setting that changes the mathematics and
// isn't supported is an Error that names it, and so is an unknown key unless its value is null,
// false or empty. `where` is the file's name, for errors.
PeftConfig parse_peft_config(std::string_view json, const std::string& where);
PeftConfig read_peft_config(const std::filesystem::path& file);

// The text of an adapter_config.json. `lora` lists its targets.
std::string peft_config(const PeftConfig& config);

}  // namespace fsdp::models
