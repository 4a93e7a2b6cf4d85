#include "cli/ckpt_source.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "base/format.h"
#include "checkpoint/files.h"
#include "checkpoint/hugging_face.h"
#include "fsdp/error.h"
#include "fsdp/tokenizer.h"
#include "models/parameter_shapes.h"
#include "train/hub_cache.h"
#include "train/model_shape.h"
#include "train/run_directory.h"
#include "train/training.h"

namespace fsdp::cli {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kLargestConfig = 16 << 20;  // bytes of a config.json
constexpr double kMostPositions = 1e9;        // also bounds token ids

// What a Hugging Face directory says beside the model's shape.
void read_others(SourceModel& model, const fs::path& dir) {
  const auto json =
      nlohmann::json::parse(checkpoint::files::read_whole(dir / "config.json", kLargestConfig),
                            nullptr, /*allow_exceptions=*/false);
  std::error_code problem;
  if (const fs::path file = dir / "generation_config.json"; fs::is_regular_file(file, problem))
    model.generation = checkpoint::files::read_whole(file, kLargestConfig);
  const auto number = [&](const char* key) -> std::optional<int64_t> {
    if (!json.is_object() || !json.contains(key)) return std::nullopt;
    // eos_token_id may be a list; generation_config.json keeps the whole list.
    const auto& found = json[key].is_array() && !json[key].empty() ? json[key][0] : json[key];
    if (!found.is_number_integer() || found < 0 || found > kMostPositions) return std::nullopt;
    return found.get<int64_t>();
  };
  model.max_positions =
      std::max(model.max_positions, number("max_position_embeddings").value_or(0));
  model.tokens = {.bos = number("bos_token_id"), .eos = number("eos_token_id")};
}

// The same for our checkpoints: what an import recorded, else what the tokenizer says.
void read_others(SourceModel& model, const checkpoint::Extra& extra, const fs::path& tokenizer) {
  const auto number = [&](const char* key) -> std::optional<int64_t> {
    const auto found = extra.find(key);
    if (found == extra.end() || !std::holds_alternative<int64_t>(found->second))
      return std::nullopt;
    return std::get<int64_t>(found->second);
  };
  if (const auto positions = number("max_positions")) model.max_positions = *positions;
  if (const auto found = extra.find("generation_config"); found != extra.end())
    if (const auto* text = std::get_if<std::string>(&found->second)) model.generation = *text;
  model.tokens = {.bos = number("bos"), .eos = number("eos")};
  if (model.tokens.bos || model.tokens.eos || tokenizer.empty()) return;
  try {
    const auto loaded = data::Tokenizer::load(tokenizer.string());
    model.tokens = {.bos = loaded->bos(), .eos = loaded->eos()};
  } catch (const Error&) {  // its files are copied anyway
  }
}

}  // namespace

CheckpointSource open_source(const std::string& given) {
  const std::string where = train::local_model(given).string();
  CheckpointSource from;
  from.hugging_face = checkpoint::is_hugging_face(where);
  from.peft = checkpoint::is_peft(where);
  if (from.hugging_face || from.peft) {
    from.dir = where;
  } else {
    const train::FoundCheckpoint found = train::find_checkpoint(where);
    from.dir = found.checkpoint;
    from.run = found.run;
  }
  from.source = std::make_unique<checkpoint::Source>(from.dir);
  return from;
}

SourceModel model_of(const CheckpointSource& from) {
  if (from.hugging_face) {
    SourceModel model{.config = models::read_hugging_face_config(from.dir / "config.json")};
    read_others(model, from.dir);
    return model;
  }
  const checkpoint::Extra extra = checkpoint::read_extras(*from.source, 0, nullptr).run;
  const train::Config config = train::config_of(extra, from.dir);
  SourceModel model{.config = train::model_shape(config)};
  if (extra.contains("config")) model.max_positions = config.data.seq;
  const bool yarn = config.model.rope_scaling == models::RopeScalingType::kYarn;
  if (yarn || config.model.rope_scaling == models::RopeScalingType::kLlama3) {  // beyond data.seq
    const double longest = config.model.rope_factor * double(config.model.rope_original_tokens);
    model.max_positions =
        std::max(model.max_positions, static_cast<int64_t>(std::min(longest, kMostPositions)));
  }
  const fs::path origin =
      extra.contains("config") ? origin_folder(from) : train::settings_beside(from.dir);
  if (!origin.empty())
    read_others(model, origin);
  else
    read_others(model, extra, tokenizer_folder(from));
  return model;
}

void check_model(const CheckpointSource& from, const models::AnyConfig& config) {
  const std::string hint = "the checkpoint and its config belong to different models.";
  std::set<std::string> expected;
  models::ParameterShapes all = models::parameter_shapes(config);
  const models::ParameterShapes buffers = models::buffer_shapes(config);
  all.insert(all.end(), buffers.begin(), buffers.end());
  for (const auto& [name, sizes] : all) {
    expected.insert(name);
    const checkpoint::TensorEntry* found = from.source->tensor("model." + name);
    if (!found && name == models::kHeadName && models::is_tied(config)) continue;
    if (!found) throw Error(formatted("{}: \"{}\" is missing.", from.dir, name), hint);
    if (found->sizes != sizes)
      throw Error(formatted("{}: \"{}\" has shape {}, but the config needs {}.", from.dir, name,
                            checkpoint::shape_text(found->sizes), checkpoint::shape_text(sizes)),
                  hint);
  }
  for (const auto& name : model_names(*from.source))
    if (!expected.contains(name))
      throw Error(formatted("{}: \"{}\" isn't a parameter of this model.", from.dir, name), hint);
}

fs::path tokenizer_folder(const CheckpointSource& from) {
  std::error_code problem;
  const auto holds = [&](const fs::path& folder) {
    return !folder.empty() && fs::is_regular_file(folder / "tokenizer.json", problem);
  };
  if (from.hugging_face || from.peft) return holds(from.dir) ? from.dir : fs::path();
  if (holds(from.run)) return from.run;
  const checkpoint::Extra extra = checkpoint::read_extras(*from.source, 0, nullptr).run;
  if (!extra.contains("config")) {
    const fs::path settings = train::settings_beside(from.dir);
    return holds(settings) ? settings : fs::path();
  }
  const auto found = extra.find("tokenizer");
  const auto* name = found == extra.end() ? nullptr : std::get_if<std::string>(&found->second);
  if (!name || fs::path(*name).filename() != "tokenizer.json") return {};
  const fs::path folder = fs::path(*name).parent_path();
  return holds(folder) ? folder : fs::path();
}

fs::path origin_folder(const CheckpointSource& from) {
  std::error_code problem;
  const fs::path origin = train::RunDirectory{from.run}.origin();
  const bool there = !from.run.empty() && fs::is_regular_file(origin / "config.json", problem);
  return there ? origin : fs::path();
}

std::optional<at::ScalarType> parse_dtype(const std::string& name) {
  const auto precision = parse_enum<shard::Precision>(name);
  return precision ? std::optional(train::dtype_of(*precision)) : std::nullopt;
}

std::vector<std::string> model_names(const checkpoint::Source& source) {
  constexpr std::string_view kPrefix = "model.";
  std::vector<std::string> names;
  for (const auto& [name, entry] : source.metadata().tensors)
    if (name.starts_with(kPrefix)) names.push_back(name.substr(kPrefix.size()));
  if (names.empty())
    throw Error(source.dir().string() + ": holds no model.",
                "a model's tensors are named \"model.NAME\".");
  return names;
}

}  // namespace fsdp::cli
