// fsdp train: resolves the config, launches ranks unless a launcher has done so, and trains.
#include <c10/util/Logging.h>
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <memory>

#include "base/exit_code.h"
#include "base/format.h"
#include "base/log.h"
#include "base/subprocess.h"
#include "cli/commands.h"
#include "comm/launch_environment.h"
#include "fsdp/error.h"
#include "fsdp/world.h"
#include "launch/environment.h"
#include "launch/launcher.h"
#include "launch/options.h"
#include "train/config_check.h"
#include "train/config_flags.h"
#include "train/config_ready.h"
#include "train/config_resolve.h"
#include "train/config_write.h"
#include "train/corpus.h"
#include "train/loop.h"
#include "train/recovery.h"
#include "train/run_directory.h"

namespace fsdp::cli {
namespace {

constexpr const char* kTrainExamples = R"(Examples:
  A demo: a small byte-level Llama on built-in text, about a minute:
    fsdp train
  A ready config with changes (fsdp train --list-configs lists them):
    fsdp train gpt2-124m --data.train tokens.bin --optim.lr 3e-4
  Your own config file; every --section.key flag is a key of the file ([optim] lr = 1e-4):
    fsdp train my.toml --steps 1000 --dir runs/mine
  Starting from a Hugging Face model, or from another run:
    fsdp train --init-from models/SmolLM2-135M --data.train my.txt --steps 200 --optim.lr 2e-5
  Resume after an interrupt or a crash, or with more steps; on any number of ranks:
    fsdp train --dir runs/mine --resume
  In a job that may be started again: begin where there is no checkpoint, else resume:
    fsdp train my.toml --dir runs/mine --resume=auto
  Print the config a run would use, with every default and its meaning:
    fsdp train llama-1b --print-config

Ranks: one per GPU, or 2 to 4 on a machine without GPUs (--ranks). Under fsdp run, torchrun, mpirun
or srun each process is a rank. SIGTERM, SIGINT or SIGUSR1 stops the run after the current step and
saves a checkpoint; ranks that take longer than --grace are killed. A second signal (other than
SIGUSR1) stops the run at once. With --resume=auto the exit code of a run that was stopped is 75.)";

struct TrainFlags {
  train::CommandLine line;
  std::string ranks = "auto";
  int max_restarts = 0;
  bool print_config = false, list_configs = false;
};

// Ranks for this machine: one per GPU; without GPUs 4, or at most 2 if there are fewer than 8
// cores. Fewer if the batch can't be divided among them.
int ranks_for_this_machine(const train::TrainConfig& train) {
  int gpus = launch::visible_gpus(), cores = launch::available_cores();
  int most = gpus > 0 ? gpus : cores >= 8 ? 4 : std::min(cores, 2), ranks = most;
  while (ranks > 1 && train.batch % (ranks * std::max<int64_t>(train.micro_batch, 1)) != 0) --ranks;
  if (ranks < most && gpus > 0)
    log::info(formatted("{} of {} GPUs are used: a batch of {} can't be divided among more.", ranks,
                        gpus, train.batch));
  return ranks;
}

int parse_ranks(const std::string& text, const train::TrainConfig& train) {
  return text == "auto" ? ranks_for_this_machine(train) : launch::parse_nproc(text);
}

// Runs this command once per rank. Chooses the directory first, so that all ranks agree on it.
int launch_ranks(int ranks, int max_restarts, const train::Resolved& resolved,
                 const train::CommandLine& line) {
  launch::Options options;
  options.nproc = ranks;
  options.max_restarts = max_restarts;
  options.prefix = launch::Options::kNever;
  options.command = {own_binary(), "train"};
  options.command.insert(options.command.end(), line.configs.begin(), line.configs.end());
  auto flag = [&](const std::string& name, const std::string& value) {
    if (!value.empty()) return options.command.push_back("--" + name + "=" + value);
    options.command.insert(options.command.end(), {"--" + name, ""});  // CLI11 would take the next
  };
  for (const auto& [name, value] : line.flags) flag(name, value);
  if (resolved.config.dir.empty()) flag("dir", train::free_directory(resolved.name).string());
  launch::complete(options);
  return launch::run(options);
}

int train_here(const train::Resolved& resolved) {
  // When a rank dies, c10d's warnings about lost connections, each with a stack, would bury its
  // error.
  if (!std::getenv("TORCH_CPP_LOG_LEVEL")) FLAGS_caffe2_log_level = c10::GLOG_ERROR;
  const comm::CommConfig& comm = resolved.config.comm;
  const train::Ended ended = train::train_through_faults(
      {.backend = comm.backend == comm::CommBackend::kAuto ? "" : enum_name(comm.backend),
       .timeout = std::chrono::milliseconds(static_cast<int64_t>(comm.timeout * 1e3))},
      {resolved.config, resolved.name, resolved.notes});
  // A batch system that starts the run again asks whether it is done.
  const bool again = resolved.config.resume == train::Resume::kAuto;
  return ended == train::Ended::kStopped && again ? kExitStopped : kExitDone;
}

int run_train(const TrainFlags& flags) {
  if (flags.list_configs) {
    std::cout << train::list_ready_configs();
    return 0;
  }
  train::Resolved resolved = checking_usage([&] { return train::resolve(flags.line); });
  if (flags.print_config) {
    std::cout << train::to_toml(resolved.config);
    return 0;
  }
  const comm::LaunchEnvironment around = comm::read_launch_environment();
  const bool launched = around.launcher != "none";
  if (launched && flags.ranks != "auto")
    throw CodedError(
        kExitUsage,
        formatted("--ranks {} was given, but a launcher already started the ranks.", flags.ranks),
        "leave out --ranks, or start fsdp train without a launcher.");
  if (launched && flags.max_restarts > 0)
    throw CodedError(kExitUsage,
                     "--max-restarts was given, but a launcher already started the ranks.",
                     "pass it to the launcher: fsdp run --max-restarts 3 ...");
  if (launched) {
    // Before ranks connect: all report the same error, not lost connections.
    checking_usage([&] { train::check(resolved.config, around.size); });
    return train_here(resolved);
  }
  const int ranks = checking_usage([&] {
    const int chosen = parse_ranks(flags.ranks, resolved.config.train);
    train::check(resolved.config, chosen);
    train::check_paths(resolved.config);
    return chosen;
  });
  if (ranks == 1 && flags.max_restarts == 0) return train_here(resolved);
  return launch_ranks(ranks, flags.max_restarts, resolved, flags.line);
}

}  // namespace

void add_train(CLI::App& app, Action& action) {
  auto flags = std::make_shared<TrainFlags>();
  CLI::App* command = app.add_subcommand("train", "Train a model; without arguments, run a demo");
  command->footer(kTrainExamples);
  command
      ->add_option("--ranks", flags->ranks,
                   "Ranks on this machine: a number, auto, gpu (one per GPU) or cpu (one per core)")
      ->type_name("N")
      ->capture_default_str();
  command
      ->add_option("--max-restarts,--max_restarts", flags->max_restarts,
                   "Replace ranks that die, up to R times, and go on from the last checkpoint, in "
                   "memory or on disk")
      ->type_name("R")
      ->check(CLI::Range(0, 1'000'000))
      ->capture_default_str();
  command->add_flag("--print-config", flags->print_config,
                    "Print the resolved config, with the meaning of every key, and exit");
  command->add_flag("--list-configs", flags->list_configs, "List the ready configs and exit");
  train::declare(*command, flags->line);
  command->callback([flags, &action] { action = [flags] { return run_train(*flags); }; });
}

}  // namespace fsdp::cli
