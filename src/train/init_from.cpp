#include "train/init_from.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/format.h"
#include "base/regular_file.h"
#include "base/shallow_json.h"
#include "checkpoint/hugging_face.h"
#include "fsdp/checkpoint.h"
#include "fsdp/error.h"
#include "fsdp/models/hugging_face.h"
#include "models/peft.h"
#include "train/config_resolve.h"
#include "train/config_values.h"
#include "train/config_write.h"
#include "train/kept_config.h"
#include "train/model_shape.h"
#include "train/run_directory.h"

namespace fsdp::train {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kLargestSettings = 16 << 20;  // bytes of a config.json
constexpr int64_t kMostTokens = 1'000'000'000;

// Options about training rather than about the weights: the run decides them.
bool is_free(const Option& option) {
  for (const char* key : {"dropout", "init_std", "balance", "z_loss", "bias_rate"})
    if (option.key == key) return true;
  return false;
}

// `model` with zeros replaced by what they stand for.
models::ModelConfig complete(const models::ModelConfig& model,
                             const models::ModelConfig& otherwise) {
  if (model.type == models::ModelType::kMlp) return model;
  Config config;
  config.model = model;
  if (model.vocab == 0) config.model.vocab = otherwise.vocab;
  if (model.max_tokens == 0) config.model.max_tokens = otherwise.max_tokens;
  set_model_shape(config.model, model_shape(config));
  return config.model;
}

// The options of `other` among `names` that would change `model`, with both values.
struct Difference {
  std::string name, wanted, there;
};
std::vector<Difference> differences(const models::ModelConfig& model,
                                    const models::ModelConfig& other,
                                    const std::set<std::string>& names) {
  Config there, wanted, asked;
  there.model = wanted.model = model;
  asked.model = other;
  auto from = options(asked), to = options(wanted);
  for (size_t i = 0; i < from.size(); ++i)
    if (from[i].section == "model" && !is_free(from[i]) && names.contains(from[i].name()))
      copy_value(from[i], to[i]);
  try {
    if (wanted.model.type == there.model.type) wanted.model = complete(wanted.model, model);
  } catch (const Error&) {  // not a valid model, so it differs
  }
  std::vector<Difference> found;
  auto before = options(there), after = options(wanted);
  for (size_t i = 0; i < before.size(); ++i)
    if (before[i].section == "model" && names.contains(before[i].name()) && !is_free(before[i]) &&
        value_text(before[i]) != value_text(after[i]))
      found.push_back({before[i].name(), value_text(from[i]), value_text(before[i])});
  return found;
}

// Makes `model` the config's, except for what the run decides.
void take_model(Config& config, const models::ModelConfig& model) {
  Config taken;
  taken.model = model;
  const auto from = options(config), to = options(taken);
  for (size_t i = 0; i < from.size(); ++i)
    if (from[i].section == "model" && is_free(from[i])) copy_value(from[i], to[i]);
  config.model = taken.model;
}

// The longest sequence of a config.json, or of the text_config in it.
void read_longest(const nlohmann::json& json, Origin& origin) {
  for (const char* key : {"max_position_embeddings", "n_positions"})
    if (json.is_object() && json.contains(key) && json[key].is_number_integer())
      origin.max_tokens = std::clamp<int64_t>(json[key].get<int64_t>(), 0, kMostTokens);
}

// What the files beside config.json say: the longest sequence, and the tokenizer.
void read_settings(Origin& origin) {
  const auto json =
      parse_shallow<nlohmann::json>(read_file(origin.settings / "config.json", kLargestSettings));
  if (json.is_object()) read_longest(json.value("text_config", json), origin);
  std::error_code problem;
  if (fs::exists(origin.settings / "tokenizer.json", problem))
    origin.tokenizer = (origin.settings / "tokenizer.json").string();
}

Origin origin_of_run(const std::string& where) {
  FoundCheckpoint found = find_checkpoint(where);
  checkpoint::Extra extra = checkpoint::read_extra(found.checkpoint);
  Config config = config_of(extra, found.checkpoint);
  if (config.lora.rank > 0)
    throw Error(
        formatted("{} has adapters alone; their base is {}.", where, config.init_from),
        formatted("write a model of both: fsdp ckpt export --merge {} OUT; then pass OUT.", where));
  Origin origin{.weights = found.checkpoint, .model = config.model};
  std::error_code problem;
  const bool foreign = !extra.contains("config");
  if (foreign)
    origin.settings = settings_beside(found.checkpoint);
  else if (!found.run.empty() &&
           fs::exists(RunDirectory{found.run}.origin() / "config.json", problem))
    origin.settings = RunDirectory{found.run}.origin();
  if (!origin.settings.empty()) read_settings(origin);
  if (const auto longest = extra.find("max_positions"); longest != extra.end())
    if (const auto* tokens = std::get_if<int64_t>(&longest->second)) origin.max_tokens = *tokens;
  if (origin.max_tokens == 0 && !foreign) origin.max_tokens = config.data.seq;
  if (foreign) return origin;
  if (config.model.type != models::ModelType::kMlp)
    set_model_shape(origin.model, model_shape(config));
  auto kept = extra.find("tokenizer");
  const auto* name = kept == extra.end() ? nullptr : std::get_if<std::string>(&kept->second);
  if (!found.run.empty() && fs::exists(RunDirectory{found.run}.tokenizer(), problem))
    origin.tokenizer = RunDirectory{found.run}.tokenizer().string();
  else if (name)
    origin.tokenizer = *name;
  return origin;
}

// What the resumed run was started with; empty if it has no config yet.
Origin origin_of_resumed(const Config& config) {
  const RunDirectory run{config.dir};
  const auto kept = read_kept_config(run);
  if (!kept) return {};
  Config started;
  apply_toml(started, kept->text, kept->file);
  return {run.config(), started.model, started.data.tokenizer};
}

// As far as the config tells.
bool reads_text(const Config& config) {
  return config.model.type != models::ModelType::kMlp && !config.data.has_token_files() &&
         config.data.train != std::vector<std::string>{"random"};
}

}  // namespace

Origin find_origin(const std::string& where) {
  fs::path dir(where);
  if (checkpoint::is_peft(dir))
    throw Error(formatted("{} has adapters alone.", where),
                "pass the model that they are for, and this directory as --lora.init_from.");
  if (!checkpoint::is_hugging_face(dir)) return origin_of_run(where);
  Origin origin{.weights = dir, .settings = dir};
  set_model_shape(origin.model, models::read_hugging_face_config(dir / "config.json"));
  read_settings(origin);
  return origin;
}

fs::path base_of_adapters(const Config& config) {
  std::error_code problem;
  if (!fs::is_directory(config.init_from, problem))
    throw Error(formatted("the base of the adapters isn't in {}.", config.init_from),
                "put it back there; a run is also resumed with --init-from and its new place.");
  return find_origin(config.init_from).weights;
}

int64_t take_origin(Config& config, const std::set<std::string>& given,
                    const std::set<std::string>& flags, bool chosen_file,
                    std::vector<std::string>& notes) {
  Origin origin = config.resumes ? origin_of_resumed(config) : find_origin(config.init_from);
  if (origin.weights.empty()) return 0;  // prepare() reports what is missing
  const std::string from = config.resumes ? config.dir : config.init_from;
  for (const Difference& one : differences(origin.model, config.model, flags))
    throw Error(formatted("{} is {} on the command line, but {} in the model in {}.", one.name,
                          one.wanted, one.there, from),
                formatted("leave out --{}: the weights determine the shape.", one.name));
  const bool base = config.lora.rank > 0;  // of adapters; a resumed run needs it, too
  if (config.resumes && flags.contains("init_from") && !base)
    notes.push_back("init_from is ignored: the run resumes from its own checkpoint.");
  if (chosen_file && !config.resumes)
    for (const Difference& one : differences(origin.model, config.model, given))
      notes.push_back(
          formatted("{} is {}, as in {}, not {}.", one.name, one.there, from, one.wanted));
  take_model(config, origin.model);
  if (!config.resumes) {
    Config probe;  // checks that all values are valid in a config
    apply_toml(probe, to_toml(config), from + ": its model as a config");
  }
  if (given.contains("data.tokenizer")) return origin.max_tokens;
  if (!origin.tokenizer.empty()) {
    config.data.tokenizer = origin.tokenizer;
  } else if (reads_text(config)) {
    notes.push_back(formatted("{} has no tokenizer.json: text is read with tokenizer {}.", from,
                              config.data.tokenizer));
  }
  return origin.max_tokens;
}

void take_adapters(Config& config, const std::set<std::string>& given) {
  const fs::path dir = config.lora.init_from;
  if (!checkpoint::is_peft(dir))
    throw Error(formatted("lora.init_from = {}: isn't a directory with {} and {}.", dir.string(),
                          checkpoint::kPeftConfig, checkpoint::kPeftWeights),
                "pass what PEFT's save_pretrained() or fsdp ckpt export wrote.");
  Config found = config;
  found.lora = models::read_peft_config(dir / checkpoint::kPeftConfig).lora;
  found.lora.dropout = config.lora.dropout;
  found.lora.base = config.lora.base;
  found.lora.init_from = config.lora.init_from;
  const auto asked = options(config), there = options(found);
  for (size_t i = 0; i < asked.size(); ++i)
    if (asked[i].section == "lora" && given.contains(asked[i].name()) &&
        value_text(asked[i]) != value_text(there[i]))
      throw Error(formatted("{} is {}, but {} in {}.", asked[i].name(), value_text(asked[i]),
                            value_text(there[i]), dir),
                  formatted("leave out {}: the adapters determine it.", asked[i].name()));
  config.lora = found.lora;
}

void keep_origin(const Origin& origin, const std::filesystem::path& into) {
  if (origin.settings.empty()) return;
  fs::create_directories(into);
  for (const char* name : {"config.json", "generation_config.json", "chat_template.jinja",
                           "special_tokens_map.json"}) {
    std::error_code none;  // not every directory has all of them
    fs::copy_file(origin.settings / name, into / name, fs::copy_options::overwrite_existing, none);
  }
}

}  // namespace fsdp::train
