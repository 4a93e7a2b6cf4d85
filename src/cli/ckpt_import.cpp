// fsdp ckpt import: converts a Hugging Face directory into a checkpoint.
#include <CLI/CLI.hpp>
#include <iostream>

#include "base/table.h"
#include "checkpoint/import.h"
#include "cli/ckpt.h"
#include "cli/ckpt_source.h"
#include "cli/transfer.h"
#include "fsdp/error.h"
#include "models/parameter_shapes.h"
#include "train/config_resolve.h"
#include "train/config_write.h"
#include "train/model_shape.h"

namespace fsdp::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kImportExamples = R"(Examples:
  Import a model, inspect it and generate text:
    fsdp ckpt import SmolLM2-135M smol
    fsdp ckpt inspect smol
    fsdp generate smol --prompt "Once"
  Fine-tune it (--init-from also takes the Hugging Face directory itself):
    fsdp train --init-from smol --data.train books/

OUT is a torch.distributed.checkpoint directory, which Python can load, too. It holds the model
without optimizer state. The tokenizer isn't copied; the checkpoint records its path.)";

struct ImportFlags {
  std::string where, out, dtype = "keep";
  bool force = false;
};

std::vector<checkpoint::Imported> imported_tensors(const CheckpointSource& from,
                                                   const models::AnyConfig& config,
                                                   const std::optional<at::ScalarType>& dtype) {
  std::vector<checkpoint::Imported> tensors;
  const bool tied = models::is_tied(config);
  for (const auto& [name, sizes] : models::parameter_shapes(config)) {
    if (tied && name == models::kHeadName) continue;
    checkpoint::Imported tensor{"model." + name, {name}, {}};
    if (tied && name == models::embedding_name(config)) tensor.names.push_back(models::kHeadName);
    tensor.dtype = checkpoint::converted(from.source->tensor(tensor.from)->dtype, dtype);
    tensors.push_back(std::move(tensor));
  }
  for (const auto& [name, sizes] : models::buffer_shapes(config))
    tensors.push_back({"model." + name, {name}, at::kFloat});
  return tensors;
}

// The values that fsdp train saves beside the model, for a run at step 0.
checkpoint::Extra extra_of(const SourceModel& model, const fs::path& tokenizer) {
  train::Config config;
  train::set_model_shape(config.model, model.config);
  std::string name;
  if (!tokenizer.empty()) name = fs::absolute(tokenizer / "tokenizer.json").string();
  if (!name.empty()) config.data.tokenizer = name;
  const std::string toml = train::to_toml(config);
  train::Config probe;  // refuse values that no config can have now, not on load
  train::apply_toml(probe, toml, "the model as a config");
  checkpoint::Extra extra = {{"step", int64_t{0}},
                             {"position", int64_t{0}},
                             {"tokens", int64_t{0}},
                             {"skipped", int64_t{0}},
                             {"seq", config.data.seq},
                             {"seed", config.train.seed},
                             {"samples_per_epoch", int64_t{0}},
                             {"tokenizer", name},
                             {"config", toml}};
  extra["special_tokens"] = true;  // prompts start as the tokenizer's template says
  if (!model.generation.empty()) extra["generation_config"] = model.generation;
  if (model.max_positions > 0) extra["max_positions"] = model.max_positions;
  if (model.tokens.bos) extra["bos"] = *model.tokens.bos;
  if (model.tokens.eos) extra["eos"] = *model.tokens.eos;
  return extra;
}

int run_import(const ImportFlags& flags) {
  std::error_code problem;
  if (!flags.force && fs::exists(fs::symlink_status(flags.out, problem)))
    throw Error(flags.out + " already exists.",
                "choose another name, or replace a checkpoint with --force.");
  const CheckpointSource from = open_source(flags.where);
  if (!from.hugging_face)
    throw Error(flags.where +
                    " isn't a Hugging Face directory: it has no config.json with "
                    "safetensors files beside it.",
                "checkpoints of fsdp train need no import.");
  const SourceModel model = model_of(from);
  check_model(from, model.config);
  const auto tensors = imported_tensors(from, model.config, parse_dtype(flags.dtype));
  int64_t bytes = 0;
  for (const auto& tensor : tensors)
    bytes += checkpoint::bytes_of(*from.source, {tensor.from, "", tensor.dtype});
  {
    Transfer transfer("writing " + flags.out, bytes);
    checkpoint::import_checkpoint(*from.source, flags.out, tensors,
                                  extra_of(model, tokenizer_folder(from)), transfer.advancing());
  }
  std::cout << flags.out << ": " << human_bytes(static_cast<double>(bytes)) << " from "
            << from.dir.string() << "\n";
  return 0;
}

}  // namespace

void add_ckpt_import(CLI::App& ckpt, Action& action) {
  auto flags = std::make_shared<ImportFlags>();
  CLI::App* command =
      ckpt.add_subcommand("import", "Convert a Hugging Face model into a checkpoint");
  command->footer(kImportExamples);
  command->add_option("model", flags->where, "Directory with config.json and safetensors files")
      ->type_name("DIR")
      ->required();
  command->add_option("out", flags->out, "Checkpoint to create")->type_name("OUT")->required();
  command->add_option("--dtype", flags->dtype, "Dtype of the weights: keep, fp32, bf16 or fp16")
      ->check(CLI::IsMember({"keep", "fp32", "bf16", "fp16"}))
      ->capture_default_str();
  command->add_flag("--force", flags->force, "Replace an existing checkpoint");
  command->callback([flags, &action] { action = [flags] { return run_import(*flags); }; });
}

}  // namespace fsdp::cli
