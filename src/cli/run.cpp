// fsdp run: the flags of the launcher (src/launch), torchrun's spellings among them.
#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdlib>
#include <memory>

#include "cli/commands.h"
#include "fsdp/error.h"
#include "launch/launcher.h"
#include "launch/options.h"

namespace fsdp::cli {
namespace {

constexpr const char* kExamples = R"(Examples:
  One node, 8 ranks:
    fsdp run -n 8 ./train --steps 100
  One rank for each GPU, 3 more tries when a rank fails, a log file for each rank:
    fsdp run -n auto --max-restarts 3 --log-dir logs ./train
  Two nodes (the same on both but for --node-rank):
    fsdp run -n 8 --nnodes 2 --node-rank 0 --master node0:29500 ./train
    fsdp run -n 8 --nnodes 2 --node-rank 1 --master node0:29500 ./train
  A Python script that was written for torchrun:
    fsdp run -n 2 train.py --lr 1e-3

Everything after the program belongs to the program; -- may stand before it.
Each rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and the rest
of torchrun's variables, and OMP_NUM_THREADS = cores / ranks unless it is set.
When a rank fails the others are ended (SIGTERM, after the grace SIGKILL), its last lines are shown,
and its exit code (128 + signal where one killed it) is returned. Processes that ranks leave behind
in their process groups end with the run. Rank 0 reads standard input unless it is a terminal.
With several nodes, launchers meet on the port after the master's (--control-port): open both.)";

struct Flags {
  std::string nproc = "1", nnodes = "1", node_rank = "0";
  std::string master, master_addr, master_port, control_port;
  std::string prefix = "auto";
  std::string program;  // stays empty: see below
  bool standalone = false, no_prefix = false, module = false, no_python = false;
  launch::Options options;
};

// What CLI11 left: the program and its arguments, after an optional "--".
std::vector<std::string> program_of(const CLI::App& run) {
  auto rest = run.remaining();
  if (!rest.empty() && rest.front() == "--") {
    rest.erase(rest.begin());
  } else if (!rest.empty() && rest.front().size() > 1 && rest.front().front() == '-') {
    throw CLI::ParseError("there is no flag " + rest.front(), CLI::ExitCodes::ExtrasError);
  }
  return rest;
}

int parse_node_rank(const std::string& text) {
  char* end = nullptr;
  long value = std::strtol(text.c_str(), &end, 10);
  if (text.empty() || *end || value < 0 || value > 65535) {
    throw Error("--node-rank \"" + text + "\" is not a node's number.", "nodes count from 0.");
  }
  return static_cast<int>(value);
}

launch::Options options_of(const Flags& flags, std::vector<std::string> program) {
  launch::Options options = flags.options;
  options.nnodes = launch::parse_nnodes(flags.nnodes);
  options.node_rank = parse_node_rank(flags.node_rank);
  bool has_parts = !flags.master_addr.empty() || !flags.master_port.empty();
  if (flags.standalone && (options.nnodes > 1 || !flags.master.empty())) {
    throw Error("--standalone is for one node that finds its own port.",
                "leave it out, or leave out --nnodes and --master.");
  }
  if (!flags.master.empty() && has_parts) {
    throw Error("--master and --master-addr / --master-port say the same twice.",
                "give one of them.");
  }
  if (!flags.master.empty()) {
    auto [host, port] = launch::parse_endpoint(flags.master, "--master");
    options.master_host = host;
    options.master_port = port;
  }
  options.master_host += flags.master_addr;
  if (!flags.master_port.empty()) {
    options.master_port = launch::parse_port(flags.master_port, "--master-port");
  }
  if (!flags.control_port.empty()) {
    options.control_port = launch::parse_port(flags.control_port, "--control-port");
  }
  if (flags.no_prefix || flags.prefix == "never") options.prefix = launch::Options::kNever;
  if (!flags.no_prefix && flags.prefix == "always") options.prefix = launch::Options::kAlways;
  options.command = launch::command_for(std::move(program), flags.module, flags.no_python);
  options.nproc = launch::parse_nproc(flags.nproc);
  launch::complete(options);
  return options;
}

std::string is_duration(const std::string& text) {
  char* end = nullptr;
  double value = std::strtod(text.c_str(), &end);
  bool good = !text.empty() && !*end && std::isfinite(value) && value >= 0 && value <= 1e6;
  return good ? "" : "\"" + text + "\" is not a number of seconds from 0 on";
}

}  // namespace

void add_run(CLI::App& app, Action& action) {
  auto flags = std::make_shared<Flags>();
  CLI::App* run = app.add_subcommand("run", "Run a program once for each rank.");
  run->footer(kExamples);

  // CLI11 must leave the program's arguments alone, whatever they look like: prefix_command() stops
  // it at the first word that is not a flag. This positional accepts nothing; it is there for
  // --help, and because without one CLI11 before 2.5 hands what follows "--" to the parent command.
  run->prefix_command();
  run->validate_positionals();
  run->add_option("program", flags->program, "The program, followed by its arguments")
      ->type_name("ARGS...")
      ->check(CLI::Validator([](std::string&) { return std::string("never"); }, ""));

  run->add_option("-n,--nproc-per-node,--nproc_per_node", flags->nproc,
                  "Ranks on this node: a number, auto (GPUs where there are some, else cores), gpu "
                  "or cpu")
      ->type_name("N")
      ->capture_default_str();
  run->add_option("--max-restarts,--max_restarts", flags->options.max_restarts,
                  "Start all ranks again when one fails, up to R times")
      ->type_name("R")
      ->check(CLI::Range(0, 1'000'000))
      ->capture_default_str();
  run->add_option("--log-dir,--log_dir", flags->options.log_dir,
                  "Keep what each rank prints in DIR/rank-0.log, ... (restarts are appended)")
      ->type_name("DIR");
  run->add_option("--grace", flags->options.grace_s, "Seconds between SIGTERM and SIGKILL")
      ->type_name("S")
      ->check(CLI::Validator(is_duration, ""))
      ->capture_default_str();
  run->add_option("--prefix", flags->prefix,
                  "Show the rank before each line: auto (where there are several), always, never")
      ->type_name("WHEN")
      ->check(CLI::IsMember({"auto", "always", "never"}))
      ->capture_default_str();
  run->add_flag("--no-prefix", flags->no_prefix, "The same as --prefix never");
  run->add_flag("-m,--module", flags->module, "The program is a Python module: python3 -m");
  run->add_flag("--no-python,--no_python", flags->no_python,
                "Run a .py file that is not executable as it is, not with python3");

  const char* nodes = "Several nodes";
  run->add_option("--nnodes", flags->nnodes, "Number of nodes")
      ->type_name("M")
      ->capture_default_str()
      ->group(nodes);
  run->add_option("--node-rank,--node_rank", flags->node_rank, "This node's number, from 0 on")
      ->type_name("K")
      ->capture_default_str()
      ->group(nodes);
  run->add_option("--master", flags->master,
                  "Node 0's address, and the port for rank 0 (29500 unless given)")
      ->type_name("HOST:PORT")
      ->group(nodes);
  run->add_option("--master-addr,--master_addr", flags->master_addr,
                  "--master in two parts: its host")
      ->type_name("HOST")
      ->group(nodes);
  run->add_option("--master-port,--master_port", flags->master_port,
                  "--master in two parts: its port")
      ->type_name("PORT")
      ->group(nodes);
  run->add_option(
         "--control-port", flags->control_port,
         "Where node 0's launcher meets the others; the port after the master's unless given")
      ->type_name("PORT")
      ->group(nodes);
  run->add_option("--rendezvous-timeout", flags->options.rendezvous_s,
                  "Seconds for all nodes to come")
      ->type_name("S")
      ->check(CLI::Validator(is_duration, ""))
      ->capture_default_str()
      ->group(nodes);
  run->add_flag("--standalone", flags->standalone, "One node and a free port (what happens anyway)")
      ->group(nodes);

  run->callback([run, flags, &action] {
    auto program = program_of(*run);
    action = [flags, program] { return launch::run(options_of(*flags, program)); };
  });
}

}  // namespace fsdp::cli
