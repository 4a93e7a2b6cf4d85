#include "models/peft.h"

#include <algorithm>
#include <array>

#include "base/format.h"
#include "base/regular_file.h"
#include "base/shallow_json.h"
#include "fsdp/error.h"
#include "models/fields.h"

namespace fsdp::models {
namespace {

constexpr size_t kLargestPeft = 4 << 20;  // bytes of an adapter_config.json
constexpr int64_t kMostRank = 65536;

// What doesn't change what the adapters compute.
constexpr std::array<std::string_view, 20> kKnownKeys = {
    "alpha_pattern",  "auto_mapping",        "base_model_name_or_path",
    "bias",           "ensure_weight_tying", "fan_in_fan_out",
    "inference_mode", "init_lora_weights",   "lora_alpha",
    "lora_dropout",   "megatron_core",       "peft_type",
    "peft_version",   "qalora_group_size",   "r",
    "revision",       "runtime_config",      "target_modules",
    "task_type",      "use_rslora"};

bool is_unset(const Json& value) {
  return value.is_null() || value == false || (value.is_structured() && value.empty()) ||
         (value.is_string() && value.get_ref<const std::string&>().empty());
}

std::vector<std::string> targets_of(const Fields& fields) {
  const char* key = "target_modules";
  if (!fields.has(key)) fields.refuse(key, "is missing");
  const Json& given = fields[key];
  std::vector<std::string> targets;
  if (!given.is_array() || given.empty())
    fields.refuse(key, "isn't a list of names (a pattern isn't supported)");
  for (const Json& one : given) {
    if (!one.is_string()) fields.refuse(key, "isn't a list of names");
    targets.push_back(one.get<std::string>());
  }
  std::sort(targets.begin(), targets.end());
  return targets;
}

// Whole numbers are written as PEFT writes them.
Json number_json(double value) {
  const bool whole = value < 1e15 && value == static_cast<double>(static_cast<int64_t>(value));
  return whole ? Json(static_cast<int64_t>(value)) : Json(value);
}

// Some ways to begin also change the base, which is then another one than its name says.
void check_start(const Fields& fields) {
  const char* key = "init_lora_weights";
  if (!fields.has(key)) return;
  const Json& start = fields[key];
  if (!start.is_boolean() && start != "gaussian" && start != "orthogonal" && start != "eva")
    fields.refuse(key, "changes the weights of the base, which isn't supported");
}

}  // namespace

PeftConfig parse_peft_config(std::string_view text, const std::string& where) {
  const Json json = text.find('\0') == std::string_view::npos ? parse_shallow<Json>(text)
                                                              : Json(Json::value_t::discarded);
  if (json.is_discarded() || !json.is_object())
    throw Error(formatted("{}: isn't a JSON object.", where),
                "pass a directory as PEFT writes it, with its adapter_config.json.");
  const Fields fields(json, where);
  fields.need_text("peft_type", {"LORA"});
  if (fields.has("bias")) fields.need_text("bias", {"none"});
  if (json.contains("alpha_pattern") && !is_unset(json["alpha_pattern"]))
    fields.refuse("alpha_pattern", "is set: adapters of different scales aren't supported");
  check_start(fields);
  for (const auto& item : json.items())
    if (std::find(kKnownKeys.begin(), kKnownKeys.end(), item.key()) == kKnownKeys.end() &&
        !is_unset(item.value()))
      fields.refuse(item.key().c_str(), "is set, which isn't supported");
  PeftConfig config;
  config.transposed = fields.flag("fan_in_fan_out", false);
  config.lora.rank = fields.count("r", std::nullopt, kMostRank);
  config.lora.alpha = fields.number("lora_alpha", 8);
  config.lora.dropout = fields.number("lora_dropout", 0);
  if (config.lora.dropout >= 1) fields.refuse("lora_dropout", "isn't below 1");
  config.lora.rslora = fields.flag("use_rslora", false);
  config.lora.targets = targets_of(fields);
  if (fields.has("base_model_name_or_path")) {
    const Json& base = fields["base_model_name_or_path"];
    if (!base.is_string()) fields.refuse("base_model_name_or_path", "isn't a string");
    config.base = base.get<std::string>();
  }
  return config;
}

PeftConfig read_peft_config(const std::filesystem::path& file) {
  return parse_peft_config(read_file(file, kLargestPeft), file.string());
}

std::string peft_config(const PeftConfig& config) {
  const nn::LoRAConfig& lora = config.lora;
  Json json = {{"peft_type", "LORA"},
               {"task_type", "CAUSAL_LM"},
               {"base_model_name_or_path", config.base},
               {"r", lora.rank},
               {"lora_alpha", number_json(lora.alpha)},
               {"lora_dropout", lora.dropout},
               {"use_rslora", lora.rslora},
               {"target_modules", lora.targets},
               {"bias", "none"},
               {"fan_in_fan_out", config.transposed},
               {"init_lora_weights", true},
               {"inference_mode", true},
               {"modules_to_save", nullptr},
               {"layers_to_transform", nullptr},
               {"layers_pattern", nullptr},
               {"rank_pattern", Json::object()},
               {"alpha_pattern", Json::object()},
               {"use_dora", false}};
  return json.dump(2) + "\n";
}

}  // namespace fsdp::models
