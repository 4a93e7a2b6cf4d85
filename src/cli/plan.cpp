// fsdp plan: predicts what a config needs on given GPUs, before anything is launched.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <memory>

#include "base/exit_code.h"
#include "base/format.h"
#include "base/table.h"
#include "cli/commands.h"
#include "cli/plan_tables.h"
#include "fsdp/error.h"
#include "fsdp/plan.h"
#include "memory/plan_search.h"
#include "train/config_check.h"
#include "train/config_flags.h"
#include "train/config_resolve.h"
#include "train/plan_config.h"

namespace fsdp::cli {
namespace {

constexpr const char* kPlanExamples = R"(Examples:
  What a ready config needs on 8 H100s, and which settings fit:
    fsdp plan llama-8b
  On other GPUs with other settings (every flag of fsdp train works here):
    fsdp plan llama-70b --gpu a100-80 --world 64 --data.seq 8192 --shard.strategy hybrid_shard
  How many GPUs it takes, and which settings are fastest on each number:
    fsdp plan llama-70b --gpu h100 --world 8..1024
  On a GPU with 24 GB:
    fsdp plan gpt2-124m --gpu 24 --world 1
  The longest sequence that fits:
    fsdp plan llama-8b --gpu h200 --world 8 --max-seq --activations.mode long

Nothing is trained and no GPU is needed: the model is built and run on tensors without memory.
docs/memory.md explains each kind of memory and how accurate plans are.)";

struct PlanFlags {
  train::CommandLine line;
  std::string gpu = "h100", world = "8", recompute, offload;
  std::vector<std::string> set;
  int per_host = 8;
  double host_memory = 2000, disk_speed = PlanOptions().disk_speed;
  bool json = false, no_survey = false, max_seq = false;
};

// Turns --set, --recompute and --offload into flags of the config, which are checked with it.
void add_short_flags(PlanFlags& flags) {
  auto& given = flags.line.flags;
  for (const std::string& one : flags.set) {
    size_t equals = one.find('=');
    if (equals == std::string::npos)
      throw CodedError(kExitUsage, formatted("--set {} has no value.", one),
                       "write --set key=value.");
    given.emplace_back(one.substr(0, equals), one.substr(equals + 1));
  }
  if (!flags.recompute.empty()) given.emplace_back("activations.mode", flags.recompute);
  if (flags.offload.empty()) return;
  auto text = [](bool on) { return on ? "true" : "false"; };
  given.emplace_back("offload.optimizer", text(flags.offload != "off"));
  for (const char* key : {"offload.parameters", "offload.gradients"})
    given.emplace_back(key, text(flags.offload == "all"));
}

std::string gpu_text(const Gpu& gpu) {
  return formatted("{} ({})", gpu.name, human_bytes(static_cast<double>(gpu.memory)));
}

train::ConfigPlan with_host(const PlanFlags& flags, train::ConfigPlan of) {
  of.options.host_memory = static_cast<int64_t>(flags.host_memory * 1e9);
  of.options.disk_speed = flags.disk_speed;
  return of;
}

train::ConfigPlan plan_of(const PlanFlags& flags, const train::Config& config, const Gpu& gpu,
                          int world) {
  return with_host(flags, train::plan_of(config, world, gpu, flags.per_host));
}

// How long sequences can be, to 2 %.
int plan_sequences(const PlanFlags& flags, const train::Config& config, const Gpu& gpu,
                   const std::vector<int>& worlds) {
  std::vector<LongestSequence> rows;
  std::string title;
  for (int world : worlds) {
    train::ConfigPlan of =
        with_host(flags, checking_usage([&] {
                    return train::plan_of_sequences(config, world, gpu, flags.per_host);
                  }));
    memory::AtBatch at_batch(of.model);
    memory::Slope slope;
    memory::Found found = memory::find_largest(at_batch, of.options, slope);
    rows.push_back({world, found.batch, std::move(found.plan)});
    title = of.title;
  }
  if (!flags.json)
    std::cout << formatted("{}\non {}, micro-batches of one sequence\n\n", title, gpu_text(gpu));
  print_sequences(rows, train::kSequencePart, flags.json);
  if (flags.json) return 0;
  if (worlds.size() == 1) std::cout << "\n" << rows.front().plan.describe();
  if (std::any_of(rows.begin(), rows.end(),
                  [](const auto& row) { return row.parts == memory::kMostSamples; }))
    std::cout << "\nThe search ends there; longer sequences may fit.\n";
  if (config.activations.mode != memory::ActivationsMode::kLong)
    std::cout << "\n--activations.mode long makes the most of the memory.\n";
  return 0;
}

int plan_worlds(const PlanFlags& flags, const train::Config& config, const Gpu& gpu,
                const std::vector<int>& worlds) {
  std::vector<PlanOptions> options;
  train::ConfigPlan of;
  for (int world : worlds) {
    of = plan_of(flags, config, gpu, world);
    of.options.batch = 0;
    options.push_back(of.options);
  }
  SurveyOptions survey = train::survey_options();
  if (flags.no_survey)
    survey = {.strategies = {of.options.shard.strategy},
              .recompute = {of.options.recompute},
              .offload = {of.options.shard.offload}};
  std::vector<WorldChoice> rows = survey_worlds(of.model, options, survey);
  if (!flags.json) std::cout << of.title << "\non " << gpu_text(gpu) << "\n\n";
  print_worlds(rows, of.tokens_per_sample, flags.json);
  if (flags.json) return 0;
  auto fits = [](const WorldChoice& row) { return row.fitting > 0; };
  if (std::none_of(rows.begin(), rows.end(), fits))
    std::cout << nothing_fits(std::any_of(rows.begin(), rows.end(),
                                          [](const WorldChoice& row) { return row.host_lacks; }));
  else
    std::cout << "\n\"Micro-batch as asked\" is for the config as it is; the other columns are the "
                 "fastest "
                 "of all settings. --world with one number lists them all.\n";
  return 0;
}

void tell_what_may_be_kept(const train::ConfigPlan& of) {
  const KeepLast kept = most_kept(of.model, of.options);
  if (kept.fits <= of.options.keep_last) return;
  std::cout << "The last " << kept.fits
            << " blocks needn't be recomputed: activations.keep_last = " << kept.fits << " fits";
  if (kept.free > of.options.keep_last)
    std::cout << ", and " << kept.free << " takes no extra memory";
  std::cout << ".\n";
}

int plan_world(const PlanFlags& flags, const train::Config& config, const Gpu& gpu, int world) {
  train::ConfigPlan of = plan_of(flags, config, gpu, world);
  Plan asked = plan(of.model, of.options);
  const PlannedSaves saves = saves_of(asked, of.options, std::min(world, flags.per_host),
                                      config.checkpoint.pool, of.adapters_saved);
  if (flags.json) {
    print_kinds(asked);
    print_verdict(asked, of.tokens_per_sample, saves);
  } else {
    std::cout << formatted("{}\n{} rank{} on {}, {} in {} units, micro-batches of {}\n\n{}\n{}.\n",
                           of.title, world, world == 1 ? "" : "s", gpu_text(gpu),
                           lower(name(of.options.shard.strategy)), asked.units, asked.batch,
                           asked.describe(), asked.fits ? "It fits" : "It doesn't fit");
    if (asked.fits && of.options.recompute.mode) tell_what_may_be_kept(of);
    std::cout << describe(saves, flags.disk_speed);
    std::cout << "\n";
  }
  if (flags.no_survey) return 0;
  of.options.batch = 0;
  std::vector<PlanChoice> choices = survey(of.model, of.options, train::survey_options());
  print_choices(choices, of.tokens_per_sample, flags.json);
  auto fits = [](const PlanChoice& choice) { return choice.largest_batch > 0; };
  auto fits_gpu = [&](const PlanChoice& choice) {
    return choice.plan.memory.total() <= gpu.memory;
  };
  if (!flags.json && std::none_of(choices.begin(), choices.end(), fits))
    std::cout << nothing_fits(std::any_of(choices.begin(), choices.end(), fits_gpu));
  return 0;
}

int run_plan(PlanFlags flags) {
  add_short_flags(flags);
  std::vector<int> worlds = worlds_of(flags.world);
  Gpu gpu = fsdp::gpu(flags.gpu);
  train::Config config = checking_usage([&] { return train::resolve(flags.line).config; });
  for (int world : worlds) train::check_choices(config, world);
  if (flags.max_seq) return plan_sequences(flags, config, gpu, worlds);
  return worlds.size() == 1 ? plan_world(flags, config, gpu, worlds.front())
                            : plan_worlds(flags, config, gpu, worlds);
}

}  // namespace

void add_plan(CLI::App& app, Action& action) {
  auto flags = std::make_shared<PlanFlags>();
  CLI::App* command = app.add_subcommand(
      "plan", "Predict the memory and speed of a config, and which settings fit");
  command->footer(kPlanExamples);
  command
      ->add_option("--gpu", flags->gpu,
                   "a100-40, a100-80, h100, h200, b200, or the memory of a GPU in GB")
      ->capture_default_str();
  command
      ->add_option(
          "--world", flags->world,
          "Ranks, one per GPU: a number (8), a list (8,16), or a range that doubles (8..1024)")
      ->capture_default_str();
  command->add_option("--per-host", flags->per_host, "GPUs per host")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command
      ->add_option("--host-memory", flags->host_memory,
                   "Memory per host in GB, for what its ranks offload; 0: no limit")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  command
      ->add_option("--disk-speed", flags->disk_speed,
                   "GB/s of a host's disk, for checkpoints and offload.directory (fsdp bench nvme "
                   "measures it)")
      ->check(CLI::Range(0.001, 1e6))
      ->capture_default_str();
  command
      ->add_option(
          "--recompute", flags->recompute,
          "none, selective, feed_forward, full, offload or long: short for --activations.mode")
      ->check(CLI::IsMember(enum_names<memory::ActivationsMode>()));
  command
      ->add_option("--offload", flags->offload,
                   "Offload to host memory: off, optimizer or all; short for --offload.*")
      ->check(CLI::IsMember({"off", "optimizer", "all"}));
  command->add_flag("--no-survey", flags->no_survey,
                    "Plan only this config, not the table of other settings");
  command->add_flag("--max-seq", flags->max_seq,
                    "Answer how long sequences can be, with one per micro-batch");
  command->add_option("--set", flags->set,
                      "A key of the config, as KEY=VALUE; the same as --KEY VALUE");
  command->add_flag(
      "--json", flags->json,
      "One JSON object per line: kinds of memory, whether it fits and step time, then "
      "settings (or one row per world size)");
  train::declare(*command, flags->line);
  command->callback([flags, &action] { action = [flags] { return run_plan(*flags); }; });
}

}  // namespace fsdp::cli
