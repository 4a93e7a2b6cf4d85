// fsdp ckpt export: writes a directory that Hugging Face transformers can load.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>

#include "base/format.h"
#include "base/table.h"
#include "checkpoint/draft.h"
#include "checkpoint/dtype.h"
#include "checkpoint/hugging_face.h"
#include "checkpoint/safetensors_write.h"
#include "cli/adapters.h"
#include "cli/ckpt.h"
#include "cli/ckpt_source.h"
#include "cli/transfer.h"
#include "fsdp/error.h"
#include "models/parameter_shapes.h"
#include "train/hub_cache.h"

namespace fsdp::cli {
namespace {

namespace fs = std::filesystem;
namespace files = checkpoint::files;

constexpr const char* kExportExamples = R"(Examples:
  The newest checkpoint of a run, in bfloat16:
    fsdp ckpt export runs/demo demo-hf
  In float32, in files of at most 2 GB:
    fsdp ckpt export runs/demo/checkpoints/step-200 demo-hf --dtype fp32 --max-shard-size 2GB
  Then in Python:
    AutoModelForCausalLM.from_pretrained("demo-hf")

  The adapters of a run with [lora], as PEFT loads them, and the model with them merged into it:
    fsdp ckpt export runs/tuned tuned-peft
    fsdp ckpt export runs/tuned tuned-hf --merge

DIR is a run's directory, its checkpoints folder, one checkpoint, or a Hugging Face directory. OUT
appears once it is complete. Tensors are streamed: memory use doesn't grow with the model.)";

constexpr const char* kConfig = "config.json";
constexpr const char* kGeneration = "generation_config.json";
constexpr const char* kTokenizerConfig = "tokenizer_config.json";
constexpr int64_t kLargestTokenizer = 256 << 20;  // bytes per file

const std::vector<std::string>& tokenizer_files() {
  static const std::vector<std::string> names = {
      "tokenizer.json",    kTokenizerConfig,      "special_tokens_map.json",
      "added_tokens.json", "chat_template.jinja", "vocab.json",
      "merges.txt"};
  return names;
}

struct ExportFlags {
  std::string where, out, dtype, most = "5GB";
  bool force = false, merge = false;
};

bool is_exported(const std::string& name) {
  const auto& tokenizer = tokenizer_files();
  return name == kConfig || name == kGeneration || checkpoint::is_safetensors_shard(name) ||
         name == checkpoint::kPeftConfig || name == checkpoint::kPeftWeights ||
         std::find(tokenizer.begin(), tokenizer.end(), name) != tokenizer.end();
}

// All parameters but a tied head, as transformers store them.
std::vector<checkpoint::Copied> exported_tensors(const SourceModel& model, at::ScalarType dtype) {
  std::vector<checkpoint::Copied> tensors;
  for (const auto& [name, sizes] : models::parameter_shapes(model.config)) {
    if (name == models::kHeadName && models::is_tied(model.config)) continue;
    for (const auto& [to, offsets, part] : models::file_parts(model.config, name, sizes)) {
      tensors.push_back({"model." + name, to, dtype});
      if (part != sizes) tensors.back().part = Rectangle{offsets, part};
    }
  }
  for (const auto& [name, sizes] : models::buffer_shapes(model.config))
    tensors.push_back({"model." + name, name, at::kFloat});
  return tensors;
}

std::string generation_config(const models::SpecialTokens& tokens) {
  nlohmann::ordered_json json;
  json["_from_model_config"] = true;
  if (tokens.bos) json["bos_token_id"] = *tokens.bos;
  if (tokens.eos) json["eos_token_id"] = *tokens.eos;
  return json.dump(2) + "\n";
}

// Copies a tokenizer's files, each from the first folder that has it. Without a
// tokenizer_config.json, writes the least that transformers need to load a tokenizer.json.
void copy_tokenizer(const std::vector<fs::path>& folders, const fs::path& to) {
  std::error_code problem;
  for (const auto& name : tokenizer_files())
    for (const auto& from : folders)
      if (!from.empty() && fs::is_regular_file(from / name, problem)) {
        files::write_whole(to / name, files::read_whole(from / name, kLargestTokenizer));
        break;
      }
  if (!fs::exists(to / kTokenizerConfig, problem))
    files::write_whole(to / kTokenizerConfig,
                       "{\n  \"tokenizer_class\": \"PreTrainedTokenizerFast\"\n}\n");
}

void say_written(const ExportFlags& flags, const CheckpointSource& from, int64_t bytes,
                 const fs::path& tokenizer) {
  std::cout << flags.out << ": " << human_bytes(static_cast<double>(bytes)) << " from "
            << from.dir.string() << (tokenizer.empty() ? ", without a tokenizer" : "") << "\n";
}

// The directory of a base is found by the name that its adapters have for it.
CheckpointSource open_base(const CheckpointSource& adapters, const models::PeftConfig& config) {
  std::error_code problem;
  const fs::path base = train::local_model(config.base);
  if (base.empty() || !fs::is_directory(base, problem))
    throw Error(formatted("{} has adapters for \"{}\", which isn't a directory here.", adapters.dir,
                          config.base),
                adapters.peft ? "set base_model_name_or_path in adapter_config.json to the "
                                "directory of that model."
                              : "put the model back: a run with adapters needs its base.");
  return open_source(base.string());
}

// Writes the adapters alone, as PEFT does.
int export_adapters(const ExportFlags& flags, const CheckpointSource& from,
                    const models::PeftConfig& config) {
  // Their masters are in float32, and they are small.
  const at::ScalarType dtype = parse_dtype(flags.dtype.empty() ? "fp32" : flags.dtype).value();
  const auto tensors = peft_tensors(from, dtype);
  const int64_t bytes = checkpoint::bytes_of(*from.source, tensors);
  const fs::path tokenizer = tokenizer_folder(from);
  checkpoint::DraftDirectory draft(flags.out, flags.force, is_exported);
  files::write_whole(draft.path() / checkpoint::kPeftConfig, models::peft_config(config));
  if (!tokenizer.empty()) copy_tokenizer({tokenizer, origin_folder(from)}, draft.path());
  {
    Transfer transfer("writing " + flags.out, bytes);
    checkpoint::write_safetensors(*from.source, draft.path() / checkpoint::kPeftWeights, tensors,
                                  {{"format", "pt"}}, transfer.advancing());
  }
  draft.publish();
  say_written(flags, from, bytes, tokenizer);
  return 0;
}

int run_export(const ExportFlags& flags) {
  const int64_t most = parse_bytes(flags.most);
  const CheckpointSource given = open_source(flags.where);
  const auto adapters = adapters_of(given);
  if (adapters && !flags.merge) return export_adapters(flags, given, *adapters);
  if (flags.merge && !adapters)
    throw Error(formatted("{} has no adapters to merge.", given.dir),
                "leave out --merge: it is a whole model.");
  std::optional<CheckpointSource> base;
  if (adapters) base = open_base(given, *adapters);
  const CheckpointSource& from = base ? *base : given;
  const SourceModel model = model_of(from);
  check_model(from, model.config);
  const at::ScalarType dtype = parse_dtype(flags.dtype.empty() ? "bf16" : flags.dtype).value();
  auto tensors = exported_tensors(model, dtype);
  if (adapters) {
    check_adapters(given, *adapters, model.config);
    merge_adapters(tensors, from, model.config, given, *adapters);
  }
  const int64_t bytes = checkpoint::bytes_of(*from.source, tensors);
  const fs::path own = tokenizer_folder(given);
  const fs::path tokenizer = own.empty() ? tokenizer_folder(from) : own;

  checkpoint::DraftDirectory draft(flags.out, flags.force, is_exported);
  files::write_whole(draft.path() / kConfig,
                     models::hugging_face_config(model.config, checkpoint::dtype_name(dtype),
                                                 model.max_positions, model.tokens));
  files::write_whole(draft.path() / kGeneration,
                     model.generation.empty() ? generation_config(model.tokens) : model.generation);
  if (!tokenizer.empty()) copy_tokenizer({tokenizer, origin_folder(given)}, draft.path());
  {
    Transfer transfer("writing " + flags.out, bytes);
    checkpoint::write_safetensors_shards(*from.source, draft.path(), tensors, most,
                                         {{"format", "pt"}}, transfer.advancing());
  }
  draft.publish();
  say_written(flags, given, bytes, tokenizer);
  return 0;
}

}  // namespace

void add_ckpt_export(CLI::App& ckpt, Action& action) {
  auto flags = std::make_shared<ExportFlags>();
  CLI::App* command =
      ckpt.add_subcommand("export", "Write a directory that Hugging Face transformers can load");
  command->footer(kExportExamples);
  command->add_option("checkpoint", flags->where, "Checkpoint to read")
      ->type_name("DIR")
      ->required();
  command->add_option("out", flags->out, "Directory to create")->type_name("OUT")->required();
  command
      ->add_option("--dtype", flags->dtype,
                   "Dtype of the weights: bf16, fp32 or fp16; default: bf16, of adapters fp32")
      ->check(CLI::IsMember({"bf16", "fp32", "fp16"}));
  command->add_option("--max-shard-size", flags->most, "Largest weight file: 5GB, 500MB, 64MiB")
      ->type_name("SIZE")
      ->capture_default_str();
  command->add_flag("--merge", flags->merge,
                    "Merge the adapters of a run with [lora] into its base");
  command->add_flag("--force", flags->force, "Replace an earlier export");
  command->callback([flags, &action] { action = [flags] { return run_export(*flags); }; });
}

}  // namespace fsdp::cli
