// fsdp plan: what a config would need on some GPUs, before anything is launched.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <iostream>
#include <memory>

#include "base/table.h"
#include "cli/commands.h"
#include "fsdp/error.h"
#include "fsdp/plan.h"
#include "observe/throughput.h"
#include "train/config_flags.h"
#include "train/config_resolve.h"
#include "train/plan_config.h"

namespace fsdp::cli {
namespace {

constexpr const char* kExamples = R"(Examples:
  What a ready config needs on 8 H100s, and which settings fit:
    fsdp plan llama-8b
  On other GPUs, more of them, with other settings; every flag of fsdp train is one here:
    fsdp plan llama-70b --gpu a100-80 --world 64 --data.seq 8192 --shard.strategy hybrid_shard
  On a GPU with 24 GB:
    fsdp plan gpt2-124m --gpu 24 --world 1

Nothing is trained and no GPU is needed: the model is built and stepped without memory or values.
docs/memory.md says what each kind of memory is and how well plans hold.)";

struct Flags {
  train::CommandLine line;
  std::string gpu = "h100", recompute = "none", offload = "off";
  std::vector<std::string> set;
  int world = 8;
  bool json = false, no_survey = false;
};

std::string name_of(const std::optional<Recompute>& recompute) {
  if (!recompute) return "none";
  return *recompute == Recompute::FULL        ? "full"
         : *recompute == Recompute::SELECTIVE ? "selective"
                                              : "offload";
}

std::string name_of(const Offload& offload) {
  if (!offload.any()) return "off";
  return offload.parameters ? "all" : "optimizer";
}

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

void print_table(const std::vector<PlanChoice>& choices, int64_t tokens_per_sample, bool json) {
  Table table({{"strategy", "strategy", Table::kLeft},
               {"recompute", "recompute", Table::kLeft},
               {"offload", "offload", Table::kLeft},
               {"fits", "fits", Table::kLeft},
               {"micro_batch", "largest micro-batch"},
               {"bytes", "memory"},
               {"host_bytes", "host"},
               {"step_ms", "ms a step"},
               {"tokens_per_second", tokens_per_sample > 1 ? "tokens/s" : "samples/s"},
               {"fastest", "choice", Table::kLeft}});
  for (const PlanChoice& choice : choices) {
    bool fits = choice.largest_batch > 0;
    auto total = static_cast<double>(choice.plan.memory.total());
    auto host = static_cast<double>(choice.plan.memory.host);
    double ms = 1e3 * choice.plan.time.total();
    double rate = choice.samples_per_second() * static_cast<double>(tokens_per_sample);
    table.add({text(lower(name(choice.strategy))), text(name_of(choice.recompute)),
               text(name_of(choice.offload)), Cell{fits, fits ? "yes" : "no", fits ? "32" : "31"},
               Cell{choice.largest_batch, fits ? std::to_string(choice.largest_batch) : "-"},
               Cell{total, human_bytes(total)}, Cell{host, host > 0 ? human_bytes(host) : ""},
               fits ? number(ms, 1) : Cell{ms, "-"},
               Cell{rate, fits ? observe::human_count(rate) : "-"},
               Cell{choice.fastest, choice.fastest ? "fastest" : "", "1"}});
  }
  table.print(std::cout, json);
}

// The kinds of the config as it is, for programs.
void print_kinds(const Plan& plan) {
  Table table({{"kind", "", Table::kLeft}, {"bytes", ""}});
  const PlannedMemory& memory = plan.memory;
  auto add = [&](const char* kind, int64_t bytes) { table.add({text(kind), Cell{bytes, ""}}); };
  add("parameters", memory.parameters);
  add("master", memory.master);
  add("gradients", memory.gradients);
  add("states", memory.states);
  add("gather_buffers", memory.gather_buffers);
  add("communication", memory.communication);
  add("activations", memory.activations);
  add("temporaries", memory.temporaries);
  add("workspaces", memory.workspaces);
  add("fragmentation", memory.fragmentation);
  add("outside", memory.outside);
  add("host", memory.host);
  table.print(std::cout, /*json=*/true);
}

int run_plan(Flags flags) {
  for (const std::string& one : flags.set) {
    size_t equals = one.find('=');
    if (equals == std::string::npos)
      throw Error("--set " + one + " gives no value.", "write --set key=value.");
    flags.line.flags.emplace_back(one.substr(0, equals), one.substr(equals + 1));
  }
  train::Resolved resolved = train::resolve(flags.line);
  Gpu gpu = fsdp::gpu(flags.gpu);
  train::ConfigPlan of = train::plan_of(resolved.config, flags.world, gpu);
  if (flags.recompute != "none")
    of.options.recompute = flags.recompute == "full" ? Recompute::FULL : Recompute::SELECTIVE;
  if (flags.offload != "off") of.options.shard.offload.optimizer = true;
  if (flags.offload == "all")
    of.options.shard.offload.parameters = of.options.shard.offload.gradients = true;
  Plan asked = plan(of.model, of.options);
  if (!flags.json) {
    std::cout << of.title << "\n"
              << flags.world << " ranks on " << gpu.name << " ("
              << human_bytes(static_cast<double>(gpu.memory)) << "), "
              << lower(name(of.options.shard.strategy)) << " in " << asked.units
              << " units, micro-batches of " << asked.batch << "\n\n"
              << asked.describe() << "\n";
    std::cout << (asked.fits ? "It fits.\n\n" : "It does not fit.\n\n");
  }
  if (flags.json) print_kinds(asked);
  if (flags.no_survey) return 0;
  PlanOptions any = of.options;
  any.batch = 0;
  std::vector<PlanChoice> choices = survey(of.model, any);
  print_table(choices, of.tokens_per_sample, flags.json);
  if (flags.json) return 0;
  bool some = false;
  for (const PlanChoice& choice : choices) some = some || choice.largest_batch > 0;
  if (!some)
    std::cout << "\nNothing fits: use more ranks (--world), or GPUs with more memory (--gpu).\n";
  return 0;
}

}  // namespace

void add_plan(CLI::App& app, Action& action) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command =
      app.add_subcommand("plan", "Say what a config needs before it is launched, and what fits.");
  command->footer(kExamples);
  command
      ->add_option("--gpu", flags->gpu,
                   "a100-40, a100-80, h100, h200, b200, or a GPU's memory in GB")
      ->capture_default_str();
  command->add_option("--world", flags->world, "Ranks, one for each GPU")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  command->add_option("--recompute", flags->recompute, "Of blocks: none, selective or full")
      ->check(CLI::IsMember({"none", "selective", "full"}))
      ->capture_default_str();
  command->add_option("--offload", flags->offload, "To host memory: off, optimizer or all")
      ->check(CLI::IsMember({"off", "optimizer", "all"}))
      ->capture_default_str();
  command->add_flag("--no-survey", flags->no_survey,
                    "Only the config as it is, no table of others");
  command->add_option("--set", flags->set, "KEY=VALUE of the config; --KEY VALUE is the same");
  command->add_flag("--json", flags->json,
                    "Kinds of memory, then settings, one JSON object a line");
  train::declare(*command, flags->line);
  command->callback([flags, &action] { action = [flags] { return run_plan(*flags); }; });
}

}  // namespace fsdp::cli
