// fsdp generate: writes text with a model, token by token: a continuation, answers in a
// conversation, or answers to the prompts in a file.
#include <CLI/CLI.hpp>
#include <chrono>
#include <iostream>
#include <iterator>
#include <memory>
#include <optional>
#include <set>

#include "base/exit_code.h"
#include "base/format.h"
#include "base/table.h"
#include "base/terminal.h"
#include "cli/chat.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/prompts.h"
#include "cli/writer.h"
#include "fsdp/error.h"

namespace fsdp::cli {
namespace {

constexpr const char* kGenerateExamples = R"(Examples:
  From the newest checkpoint of a run:
    fsdp generate runs/demo --prompt "class "
  From a given checkpoint, always taking the likeliest token:
    fsdp generate runs/demo/checkpoints/step-200 --temperature 0
  From a Hugging Face model: its directory, or its name if it was downloaded:
    fsdp generate Qwen/Qwen3-0.6B --prompt "Once upon a time"
  A conversation with a tuned model, or with an adapter directory of PEFT:
    fsdp generate runs/tuned --chat
    fsdp generate tuned-peft --chat --system "Answer in one sentence."
  One question; each line of a pipe as a message of one conversation:
    fsdp generate runs/tuned --chat --prompt "What is a shard?"
    printf 'What is a shard?\nAnd a unit?\n' | fsdp generate runs/tuned --chat --quiet
  Many prompts, 16 at a time; answers in the same order as lines of JSON:
    fsdp generate runs/tuned --chat --prompts questions.jsonl --batch 16 > answers.jsonl

--chat writes the conversation with the model's chat template, stops at the token that ends a turn, and
samples as the model's generation_config.json says unless flags say otherwise. --prompts reads a line
of text per prompt, or from a .jsonl file {"prompt": "..."} or {"messages": [...]}. Text goes to stdout
as it is generated, everything else to stderr. The same seed gives the same text.)";

constexpr int64_t kAnswerTokens = 2048;  // at most, unless --tokens says otherwise

struct GenerateFlags {
  std::string where, prompt, tokenizer, system, chat_template, prompts;
  train::SampleOptions sample;
  int64_t batch = 8;
  std::string device = "auto";
  bool quiet = false, chat = false;
  bool said_prompt = false;                  // even if it is empty
  std::set<std::string> said_sampling = {};  // flags of it that were given
};

void check_flags(const GenerateFlags& flags, bool chats) {
  const auto refuse = [](const std::string& what, const std::string& hint) {
    throw CodedError(kExitUsage, what, hint);
  };
  if (flags.said_prompt && !flags.prompts.empty())
    refuse("--prompt and --prompts were both given.", "pass one of them.");
  for (const auto& [given, name] : {std::pair(!flags.system.empty(), "--system"),
                                    std::pair(!flags.chat_template.empty(), "--chat-template")})
    if (given && !chats)
      refuse(formatted("{} has no effect: this isn't a conversation.", name), "add --chat.");
}

std::string prompt_of(const GenerateFlags& flags) {
  if (flags.prompt != "-") return flags.prompt;
  return {std::istreambuf_iterator<char>(std::cin), {}};
}

// What the flags say, else what the model says.
train::SampleOptions sampling_of(const GenerateFlags& flags, const WriterFiles& files, bool chats) {
  if (!chats) return flags.sample;
  const auto said = [&](const char* name) { return flags.said_sampling.contains(name); };
  train::SampleOptions sample = flags.sample, recommended = flags.sample;
  take_sampling(files, recommended);
  if (!said("--temperature")) sample.temperature = recommended.temperature;
  if (!said("--top-k")) sample.top_k = recommended.top_k;
  if (!said("--top-p")) sample.top_p = recommended.top_p;
  if (!said("--tokens")) sample.tokens = kAnswerTokens;
  return sample;
}

int continue_text(Writer& writer, const GenerateFlags& flags) {
  const std::string text = prompt_of(flags);
  const auto prompt = writer.encode(text);
  std::cout << paint(STDOUT, "2", text) << std::flush;
  const auto start = std::chrono::steady_clock::now();
  const int64_t made = writer.write(prompt, flags.sample, [](const std::string& piece) {
    std::cout << piece << std::flush;
    return static_cast<bool>(std::cout);
  });
  std::cout << std::endl;
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  if (!flags.quiet)
    std::cerr << "fsdp: " << made << " tokens, " << number(double(made) / took.count(), 1).text
              << " per second\n";
  return 0;
}

int run_generate(const GenerateFlags& flags) {
  checking_usage([&] { train::check(flags.sample); });
  const bool chats = flags.chat || (!flags.prompts.empty() && has_conversations(flags.prompts));
  check_flags(flags, chats);
  WriterFiles files = find_writer(flags.where, flags.tokenizer);
  const train::SampleOptions sample = sampling_of(flags, files, chats);
  Writer writer(std::move(files), flags.device);
  if (!flags.quiet)
    std::cerr << "fsdp: " << writer.title() << ", " << writer.files().weights.string() << "\n";
  std::optional<Chat> chat;
  if (chats) chat.emplace(writer, flags.chat_template);
  if (!flags.prompts.empty())
    return answer_prompts(
        writer, chat ? &*chat : nullptr,
        {.file = flags.prompts, .system = flags.system, .batch = flags.batch, .quiet = flags.quiet},
        sample);
  if (!chat) return continue_text(writer, flags);
  std::string prompt = prompt_of(flags);
  if (flags.prompt == "-" && prompt.ends_with('\n')) prompt.pop_back();
  return converse(writer, *chat, {.system = flags.system, .prompt = prompt, .quiet = flags.quiet},
                  sample);
}

void add_chat_flags(Flags& flags, GenerateFlags& given) {
  flags.flag("--chat", given.chat, "Converse: each line of stdin, or --prompt, is a message");
  flags.any("--system", given.system, "With --chat: what the system's message says", "TEXT");
  flags.any("--chat-template", given.chat_template,
            "With --chat: a template's file; default: the model's own", "FILE");
  flags.any("--prompts", given.prompts,
            "Answer every prompt in FILE, and write a line of JSON for each", "FILE");
  flags.number("--batch", given.batch, "With --prompts: how many are answered together", 1, 4096);
}

void add_sampling_flags(Flags& flags, GenerateFlags& given) {
  const auto note = [&given](CLI::Option* option, const char* name) {
    option->each([&given, name](const std::string&) { given.said_sampling.insert(name); });
  };
  note(flags.any("--tokens", given.sample.tokens, "Most tokens to generate; with --chat 2048", "N"),
       "--tokens");
  note(flags.any("--temperature", given.sample.temperature,
                 "0: always the likeliest token; 1: sample from the model's distribution", "X"),
       "--temperature");
  note(flags.any("--top-k", given.sample.top_k, "Sample from the K likeliest tokens; 0: from all",
                 "K"),
       "--top-k");
  note(flags.any("--top-p", given.sample.top_p,
                 "Sample from the likeliest tokens with this total probability", "P"),
       "--top-p");
  flags.any("--seed", given.sample.seed, "Random seed", "N");
}

}  // namespace

void add_generate(CLI::App& app, Action& action) {
  auto given = std::make_shared<GenerateFlags>();
  Flags flags(app, "generate", "Generate text with a trained model, or converse with it",
              kGenerateExamples);
  flags
      .any("checkpoint", given->where,
           "A run's directory, one of its checkpoints, a directory of Hugging Face's transformers "
           "or PEFT, the name of a downloaded model, or a checkpoint of PyTorch with its "
           "config.json",
           "DIR")
      ->required();
  flags
      .any("--prompt", given->prompt,
           "Text to continue; -: read it from stdin; empty: start a new document", "TEXT")
      ->each([given](const std::string&) { given->said_prompt = true; });
  add_chat_flags(flags, *given);
  add_sampling_flags(flags, *given);
  flags.any("--tokenizer", given->tokenizer,
            "bytes or a tokenizer.json; default: the one the model was trained with", "FILE");
  flags.choice("--device", given->device, {"auto", "cpu", "cuda"}, "auto, cpu or cuda");
  flags.flag("--quiet", given->quiet, "Print nothing but the text");
  flags.command.callback([given, &action] { action = [given] { return run_generate(*given); }; });
}

}  // namespace fsdp::cli
