// fsdp generate: writes text with a model, token by token.
#include <CLI/CLI.hpp>
#include <chrono>
#include <iostream>
#include <iterator>
#include <memory>

#include "base/exit_code.h"
#include "base/format.h"
#include "base/table.h"
#include "base/terminal.h"
#include "checkpoint/hugging_face.h"
#include "cli/commands.h"
#include "comm/modules.h"
#include "fsdp/checkpoint.h"
#include "fsdp/error.h"
#include "fsdp/models/hugging_face.h"
#include "fsdp/tokenizer.h"
#include "models/peft.h"
#include "train/init_from.h"
#include "train/model_shape.h"
#include "train/run_directory.h"
#include "train/sample.h"
#include "train/task.h"

namespace fsdp::cli {
namespace {

constexpr const char* kGenerateExamples = R"(Examples:
  From the newest checkpoint of a run:
    fsdp generate runs/demo --prompt "class "
  From a given checkpoint, always taking the likeliest token:
    fsdp generate runs/demo/checkpoints/step-200 --temperature 0
  From a Hugging Face model with its tokenizer.json:
    fsdp generate models/SmolLM2-135M --prompt "Once upon a time"
  With a prompt of several lines, printing nothing but text:
    fsdp generate runs/demo --prompt - --quiet < prompt.txt

Text goes to stdout as it is generated, everything else to stderr. The same seed gives the same
text.)";

struct GenerateFlags {
  std::string where, prompt, tokenizer;
  train::SampleOptions sample;
  std::string device = "auto";
  bool quiet = false;
};

// The model that writes: its shape, weights and tokenizer.
struct Writer {
  std::filesystem::path weights;
  train::Config config;
  std::shared_ptr<const data::Tokenizer> tokenizer;
  bool special_tokens = false;  // prompts start as the tokenizer's template says
};

Writer from_hugging_face(const GenerateFlags& flags) {
  std::filesystem::path dir = flags.where;
  Writer writer{.weights = dir, .special_tokens = true};
  train::set_model_shape(writer.config.model,
                         models::read_hugging_face_config(dir / "config.json"));
  writer.config.model.dropout = 0;
  if (flags.tokenizer.empty() && !std::filesystem::exists(dir / "tokenizer.json"))
    throw Error(flags.where + " has no tokenizer.json.",
                "pass one with --tokenizer FILE, or --tokenizer bytes.");
  writer.tokenizer = data::Tokenizer::load(flags.tokenizer.empty() ? flags.where : flags.tokenizer);
  return writer;
}

// From --tokenizer, else the run's directory, else what the checkpoint names.
std::shared_ptr<const data::Tokenizer> tokenizer_of(const GenerateFlags& flags,
                                                    const train::FoundCheckpoint& found,
                                                    const checkpoint::Extra& extra) {
  if (!flags.tokenizer.empty()) return data::Tokenizer::load(flags.tokenizer);
  train::RunDirectory run{found.run};
  if (!found.run.empty() && std::filesystem::exists(run.tokenizer()))
    return data::Tokenizer::load(found.run.string());
  auto kept = extra.find("tokenizer");
  const auto* name = kept == extra.end() ? nullptr : std::get_if<std::string>(&kept->second);
  if (!name || name->empty())
    throw Error("the model was trained on token files, which don't name their tokenizer.",
                "pass the tokenizer.json that made them with --tokenizer FILE.");
  return data::Tokenizer::load(*name);
}

Writer from_run(const GenerateFlags& flags) {
  train::FoundCheckpoint found = train::find_checkpoint(flags.where);
  checkpoint::Extra extra = checkpoint::read_extra(found.checkpoint);
  const auto special = extra.find("special_tokens");  // set by fsdp ckpt import
  const bool* as_template = special == extra.end() ? nullptr : std::get_if<bool>(&special->second);
  return {.weights = found.checkpoint,
          .config = train::config_of(extra, found.checkpoint),
          .tokenizer = tokenizer_of(flags, found, extra),
          .special_tokens = as_template && *as_template};
}

Writer writer_of(const GenerateFlags& flags) {
  if (!checkpoint::is_peft(flags.where))
    return checkpoint::is_hugging_face(flags.where) ? from_hugging_face(flags) : from_run(flags);
  const std::filesystem::path adapters = flags.where;
  const models::PeftConfig peft = models::read_peft_config(adapters / checkpoint::kPeftConfig);
  GenerateFlags base = flags;
  base.where = peft.base;
  std::error_code problem;
  if (flags.tokenizer.empty() && std::filesystem::exists(adapters / "tokenizer.json", problem))
    base.tokenizer = flags.where;
  if (peft.base.empty() || !std::filesystem::is_directory(peft.base, problem))
    throw Error(formatted("{} has adapters for \"{}\", which isn't a directory here.", flags.where,
                          peft.base),
                "download that model and set base_model_name_or_path in adapter_config.json to "
                "its directory.");
  Writer writer = writer_of(base);
  writer.config.lora = peft.lora;
  writer.config.init_from = peft.base;
  writer.weights = adapters;
  return writer;
}

void load_weights(const Writer& writer, torch::nn::Module& module) {
  checkpoint::LoadOptions own;
  if (writer.config.lora.rank > 0) {
    own.only = nn::is_adapter;
    checkpoint::load(train::base_of_adapters(writer.config), module,
                     {.only = [](const std::string& name) { return !nn::is_adapter(name); }});
  }
  checkpoint::load(writer.weights, module, own);
}

at::Device device_of(const std::string& wanted) {
  const comm::Module* cuda = wanted == "cpu" ? nullptr : comm::find_module("cuda");
  bool usable = cuda && cuda->devices() > 0;
  if (wanted == "cuda" && !usable)
    throw Error("no usable GPU was found.",
                "fsdp doctor says why; --device cpu works without one.");
  return usable ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
}

std::string prompt_of(const GenerateFlags& flags) {
  if (flags.prompt != "-") return flags.prompt;
  return {std::istreambuf_iterator<char>(std::cin), {}};
}

int run_generate(const GenerateFlags& flags) {
  checking_usage([&] { train::check(flags.sample); });
  Writer writer = writer_of(flags);
  const auto& tokenizer = writer.tokenizer;
  if (writer.config.model.type == models::ModelType::kMlp)
    throw Error("an mlp can't generate text.", "pass a run of a language model.");
  at::Device device = device_of(flags.device);
  train::TrainTask task = train::make_unfilled_task(writer.config, tokenizer->vocab_size());
  load_weights(writer, *task.module);
  task.module->to(device);
  if (!flags.quiet) std::cerr << "fsdp: " << task.title << ", " << writer.weights.string() << "\n";

  std::string text = prompt_of(flags);
  std::vector<int64_t> prompt;
  for (int32_t id : tokenizer->encode(text, {.special_tokens = writer.special_tokens}))
    prompt.push_back(id);
  if (prompt.empty()) prompt.push_back(tokenizer->eos().value_or(0));
  for (int64_t id : prompt)
    if (id >= task.text->vocab())
      throw Error(formatted("the prompt has token {}, but the model's vocabulary has {}.", id,
                            task.text->vocab()),
                  "pass the tokenizer that the model was trained with: --tokenizer FILE.");
  data::StreamDecoder decoder(tokenizer);
  std::cout << paint(STDOUT, "2", text) << std::flush;
  int64_t made = 0;
  auto start = std::chrono::steady_clock::now();
  auto show = [&](int64_t token) {
    if (tokenizer->eos() == token) return false;
    ++made;
    if (token < tokenizer->vocab_size())  // the model's vocabulary may be padded
      std::cout << decoder.push(static_cast<int32_t>(token)) << std::flush;
    return static_cast<bool>(std::cout);
  };
  train::generate(*task.text, device, prompt, flags.sample, show);
  std::cout << decoder.finish() << std::endl;
  std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  if (!flags.quiet)
    std::cerr << "fsdp: " << made << " tokens, " << number(double(made) / took.count(), 1).text
              << " per second\n";
  return 0;
}

}  // namespace

void add_generate(CLI::App& app, Action& action) {
  auto flags = std::make_shared<GenerateFlags>();
  CLI::App* command = app.add_subcommand("generate", "Generate text with a trained model");
  command->footer(kGenerateExamples);
  command
      ->add_option("checkpoint", flags->where,
                   "A run's directory, one of its checkpoints, or a directory of Hugging Face's "
                   "transformers or PEFT")
      ->type_name("DIR")
      ->required();
  command
      ->add_option("--prompt", flags->prompt,
                   "Text to continue; -: read it from stdin; empty: start a new document")
      ->type_name("TEXT");
  command->add_option("--tokens", flags->sample.tokens, "Most tokens to generate")
      ->type_name("N")
      ->capture_default_str();
  command
      ->add_option("--temperature", flags->sample.temperature,
                   "0: always the likeliest token; 1: sample from the model's distribution")
      ->type_name("X")
      ->capture_default_str();
  command
      ->add_option("--top-k", flags->sample.top_k,
                   "Sample from the K likeliest tokens; 0: from all")
      ->type_name("K")
      ->capture_default_str();
  command
      ->add_option("--top-p", flags->sample.top_p,
                   "Sample from the likeliest tokens with this total probability")
      ->type_name("P")
      ->capture_default_str();
  command->add_option("--seed", flags->sample.seed, "Random seed")
      ->type_name("N")
      ->capture_default_str();
  command
      ->add_option("--tokenizer", flags->tokenizer,
                   "bytes or a tokenizer.json; default: the one the model was trained with")
      ->type_name("FILE");
  command->add_option("--device", flags->device, "auto, cpu or cuda")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  command->add_flag("--quiet", flags->quiet, "Print nothing but the text");
  command->callback([flags, &action] { action = [flags] { return run_generate(*flags); }; });
}

}  // namespace fsdp::cli
