#include "cli/writer.h"

#include <nlohmann/json.hpp>
#include <optional>

#include "base/format.h"
#include "base/regular_file.h"
#include "base/shallow_json.h"
#include "checkpoint/hugging_face.h"
#include "comm/modules.h"
#include "fsdp/checkpoint.h"
#include "fsdp/error.h"
#include "fsdp/models/hugging_face.h"
#include "fsdp/nn/quantised.h"
#include "models/peft.h"
#include "train/hub_cache.h"
#include "train/init_from.h"
#include "train/model_shape.h"
#include "train/run_directory.h"

namespace fsdp::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// The files beside config.json that say how to write.
void read_settings(WriterFiles& files, const fs::path& folder) {
  if (folder.empty()) return;
  files.generation = read_if_there(folder / "generation_config.json");
  files.model_config = read_if_there(folder / "config.json");
}

WriterFiles from_hugging_face(const std::string& where, const std::string& tokenizer) {
  const fs::path dir = where;
  WriterFiles files{.weights = dir, .special_tokens = true};
  train::set_model_shape(files.config.model, models::read_hugging_face_config(dir / "config.json"));
  files.config.model.dropout = 0;
  if (tokenizer.empty() && !fs::exists(dir / "tokenizer.json"))
    throw Error(where + " has no tokenizer.json.",
                "pass one with --tokenizer FILE, or --tokenizer bytes.");
  files.tokenizer = data::Tokenizer::load(tokenizer.empty() ? where : tokenizer);
  read_settings(files, dir);
  return files;
}

// From --tokenizer, else the run's directory, else what the checkpoint names, or what is beside it.
std::shared_ptr<const data::Tokenizer> tokenizer_of(const std::string& tokenizer,
                                                    const train::FoundCheckpoint& found,
                                                    const checkpoint::Extra& extra,
                                                    const fs::path& beside) {
  if (!tokenizer.empty()) return data::Tokenizer::load(tokenizer);
  train::RunDirectory run{found.run};
  if (!found.run.empty() && fs::exists(run.tokenizer()))
    return data::Tokenizer::load(found.run.string());
  if (!beside.empty() && fs::exists(beside / "tokenizer.json"))
    return data::Tokenizer::load(beside.string());
  auto kept = extra.find("tokenizer");
  const auto* name = kept == extra.end() ? nullptr : std::get_if<std::string>(&kept->second);
  if (!name || name->empty())
    throw Error(extra.contains("config")
                    ? "the model was trained on token files, which don't name their tokenizer."
                    : formatted("there is no tokenizer.json beside {}.", found.checkpoint),
                "pass the tokenizer.json that the model was trained with: --tokenizer FILE.");
  return data::Tokenizer::load(*name);
}

WriterFiles from_run(const std::string& where, const std::string& tokenizer) {
  const train::FoundCheckpoint found = train::find_checkpoint(where);
  const checkpoint::Extra extra = checkpoint::read_extra(found.checkpoint);
  const auto special = extra.find("special_tokens");  // set by fsdp ckpt import
  const bool* as_template = special == extra.end() ? nullptr : std::get_if<bool>(&special->second);
  const bool foreign = !extra.contains("config");
  const fs::path beside = foreign ? train::settings_beside(found.checkpoint) : fs::path();
  WriterFiles files{.weights = found.checkpoint,
                    .config = train::config_of(extra, found.checkpoint),
                    .tokenizer = tokenizer_of(tokenizer, found, extra, beside),
                    .special_tokens = foreign || (as_template && *as_template)};
  read_settings(files,
                foreign || found.run.empty() ? beside : train::RunDirectory{found.run}.origin());
  if (const auto kept = extra.find("generation_config"); kept != extra.end())
    if (const auto* text = std::get_if<std::string>(&kept->second)) files.generation = *text;
  return files;
}

// A model of transformers, or a run.
WriterFiles from_model(const std::string& where, const std::string& tokenizer) {
  return checkpoint::is_hugging_face(where) ? from_hugging_face(where, tokenizer)
                                            : from_run(where, tokenizer);
}

WriterFiles from_adapters(const std::string& where, std::string tokenizer) {
  const fs::path adapters = where;
  const models::PeftConfig peft = models::read_peft_config(adapters / checkpoint::kPeftConfig);
  std::error_code problem;
  if (tokenizer.empty() && fs::exists(adapters / "tokenizer.json", problem)) tokenizer = where;
  const fs::path base = train::local_model(peft.base);
  if (base.empty() || !fs::is_directory(base, problem))
    throw Error(
        formatted("{} has adapters for \"{}\", which isn't a directory here.", where, peft.base),
        "download that model and set base_model_name_or_path in adapter_config.json to "
        "its directory.");
  WriterFiles files = from_model(base.string(), tokenizer);
  files.config.lora = peft.lora;
  files.config.init_from = base.string();
  files.weights = adapters;
  return files;
}

void load_weights(const WriterFiles& files, torch::nn::Module& module) {
  checkpoint::LoadOptions own;
  if (files.config.lora.rank > 0) {
    own.only = nn::is_adapter;
    checkpoint::load(train::base_of_adapters(files.config), module,
                     {.only = [](const std::string& name) { return !nn::is_adapter(name); },
                      .made_of = nn::quantised_rows(module)});
  }
  checkpoint::load(files.weights, module, own);
}

at::Device device_of(const std::string& wanted) {
  const comm::Module* cuda = wanted == "cpu" ? nullptr : comm::find_module("cuda");
  bool usable = cuda && cuda->devices() > 0;
  if (wanted == "cuda" && !usable)
    throw Error("no usable GPU was found.",
                "fsdp doctor says why; --device cpu works without one.");
  return usable ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
}

json object_in(const std::string& text) {
  json value = parse_shallow<json>(text);
  return value.is_object() ? value : json::object();
}

// eos_token_id is a number or a list of them.
void add_ends(const std::string& text, std::set<int64_t>& ends) {
  const json settings = object_in(text);
  const auto found = settings.find("eos_token_id");
  if (found == settings.end()) return;
  const json list = found->is_array() ? *found : json::array({*found});
  for (const json& id : list)
    if (id.is_number_integer() && id >= 0) ends.insert(id.get<int64_t>());
}

}  // namespace

WriterFiles find_writer(const std::string& given, const std::string& tokenizer) {
  const std::string where = train::local_model(given).string();
  WriterFiles files =
      checkpoint::is_peft(where) ? from_adapters(where, tokenizer) : from_model(where, tokenizer);
  if (files.config.model.type == models::ModelType::kMlp)
    throw Error("an mlp can't generate text.", "pass a run of a language model.");
  return files;
}

void take_sampling(const WriterFiles& files, train::SampleOptions& options) {
  const json settings = object_in(files.generation);
  if (settings.value("do_sample", json(false)) != true) return;
  const auto number = [&](const char* key) -> std::optional<double> {
    const auto found = settings.find(key);
    if (found == settings.end() || !found->is_number()) return std::nullopt;
    return found->get<double>();
  };
  train::SampleOptions said = options;
  if (const auto value = number("temperature")) said.temperature = *value;
  if (const auto value = number("top_p")) said.top_p = *value;
  if (const auto value = number("top_k"); value && *value >= 0 && *value < 1e9)
    said.top_k = static_cast<int64_t>(*value);
  try {
    train::check(said);
    options = said;
  } catch (const Error&) {  // not numbers to sample with
  }
}

Writer::Writer(WriterFiles files, const std::string& device)
    : files_(std::move(files)), device_(device_of(device)) {
  task_ = train::make_unfilled_task(files_.config, files_.tokenizer->vocab_size());
  load_weights(files_, *task_.module);
  task_.module->to(device_);
  if (const auto eos = files_.tokenizer->eos()) ends_.insert(*eos);
  add_ends(files_.model_config, ends_);
  add_ends(files_.generation, ends_);
}

std::vector<int64_t> Writer::encode(const std::string& text, bool template_written) const {
  const data::EncodeOptions options{.special_tokens = files_.special_tokens && !template_written};
  std::vector<int64_t> ids;
  for (int32_t id : tokenizer().encode(text, options)) ids.push_back(id);
  if (ids.empty()) ids.push_back(tokenizer().eos().value_or(0));
  for (int64_t id : ids)
    if (id >= task_.text->vocab())
      throw Error(formatted("the prompt has token {}, but the model's vocabulary has {}.", id,
                            task_.text->vocab()),
                  "pass the tokenizer that the model was trained with: --tokenizer FILE.");
  return ids;
}

int64_t Writer::write(const std::vector<int64_t>& prompt, const train::SampleOptions& options,
                      const std::function<bool(const std::string&)>& show) {
  data::StreamDecoder decoder(files_.tokenizer);
  int64_t made = 0;
  bool wanted = true;
  train::generate(*task_.text, device_, prompt, options, [&](int64_t token) {
    if (ends_.contains(token)) return false;
    ++made;
    if (token < tokenizer().vocab_size())  // the model's vocabulary may be padded
      wanted = show(decoder.push(static_cast<int32_t>(token)));
    return wanted;
  });
  if (wanted) show(decoder.finish());
  return made;
}

std::vector<Writer::Written> Writer::write_batch(const std::vector<std::vector<int64_t>>& prompts,
                                                 const train::SampleOptions& options,
                                                 uint64_t first) {
  std::vector<Written> written;
  for (const train::Continuation& one :
       train::generate_batch(*task_.text, device_, prompts, options, ends_, first)) {
    data::StreamDecoder decoder(files_.tokenizer);
    Written& made = written.emplace_back();
    for (int64_t token : one.tokens)
      if (token < tokenizer().vocab_size()) made.text += decoder.push(static_cast<int32_t>(token));
    made.text += decoder.finish();
    made.tokens = static_cast<int64_t>(one.tokens.size());
    made.ended = one.ended;
  }
  return written;
}

}  // namespace fsdp::cli
