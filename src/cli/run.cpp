// fsdp run: the flags of the launcher (src/launch); torchrun's spellings work, too.
#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdlib>
#include <memory>

#include "base/exit_code.h"
#include "base/format.h"
#include "base/secret.h"
#include "cli/commands.h"
#include "fsdp/error.h"
#include "launch/launcher.h"
#include "launch/options.h"

namespace fsdp::cli {
namespace {

constexpr const char* kRunExamples = R"(Examples:
  One node, 8 ranks:
    fsdp run -n 8 ./train --steps 100
  One rank per GPU, up to 3 restarts when a rank fails, one log file per rank:
    fsdp run -n auto --max-restarts 3 --log-dir logs ./train
  Two nodes (only --node-rank differs):
    fsdp run -n 8 --nnodes 2 --node-rank 0 --master node0:29500 ./train
    fsdp run -n 8 --nnodes 2 --node-rank 1 --master node0:29500 ./train
  A Python script written for torchrun:
    fsdp run -n 2 train.py --lr 1e-3

Everything after the program is passed to it; you may put -- before the program.
Each rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and
torchrun's other variables, and OMP_NUM_THREADS = cores / ranks unless it is set.
When a rank fails, the launcher stops the others (SIGTERM, then SIGKILL after --grace), shows the
rank's last lines and returns its exit code (128 + signal if a signal killed it). Processes that
ranks leave in their process groups are killed at the end. Rank 0 reads stdin unless it is a
terminal.
SIGTERM, SIGINT, SIGHUP or SIGUSR1 to the launcher stops the ranks in the same way: ranks get the
signal itself (SIGTERM for SIGHUP). If ranks have to be killed, a report says where each one was. A
second signal kills at once; SIGUSR1, which batch systems send ahead of a time limit, doesn't count.
The exit code is 0 if every rank exits with 0, else 128 + signal; docs/commands.md has the table.
With several nodes, launchers meet on the port after the master's (--control-port): open both
ports, and give every node the same secret (--secret-file), or anyone who reaches them can join.)";

struct RunFlags {
  std::string nproc = "1", nnodes = "1", node_rank = "0";
  std::string master, master_addr, master_port, control_port;
  std::string prefix = "auto";
  std::string secret_file;
  std::string program;  // always empty: see add_run
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
  if (text == "spare") return launch::kSpareNode;
  char* end = nullptr;
  long value = std::strtol(text.c_str(), &end, 10);
  if (text.empty() || *end || value < 0 || value > 65535)
    throw Error(formatted("--node-rank \"{}\" isn't a node's number.", text),
                "nodes are numbered from 0; spare takes the place of one that is lost.");
  return static_cast<int>(value);
}

launch::Options options_of(const RunFlags& flags, std::vector<std::string> program) {
  launch::Options options = flags.options;
  const launch::NodeCount nodes = launch::parse_nnodes(flags.nnodes);
  options.nnodes = nodes.most;
  options.least_nodes = nodes.least;
  options.node_rank = parse_node_rank(flags.node_rank);
  bool has_parts = !flags.master_addr.empty() || !flags.master_port.empty();
  if (flags.standalone && (options.nnodes > 1 || !flags.master.empty())) {
    throw Error("--standalone means one node on a free port; it excludes --nnodes and --master.",
                "leave out --standalone, or leave out --nnodes and --master.");
  }
  if (!flags.master.empty() && has_parts) {
    throw Error("--master excludes --master-addr and --master-port.",
                "give --master HOST:PORT, or the other two.");
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
  options.secret = flags.secret_file.empty()
                       ? secret::of_environment()
                       : secret::from_file(flags.secret_file, "--secret-file");
  if (options.secret.empty() && options.nnodes == 1) options.secret = secret::random();
  return options;
}

std::string is_duration(const std::string& text) {
  char* end = nullptr;
  double value = std::strtod(text.c_str(), &end);
  bool good = !text.empty() && !*end && std::isfinite(value) && value >= 0 && value <= 1e6;
  return good ? "" : formatted("\"{}\" isn't a number of seconds (0 or more)", text);
}

// CLI11 must leave the program's arguments alone, whatever they look like: prefix_command() stops
// it at the first word that isn't a flag. The positional accepts nothing; it is there for --help,
// and because without one CLI11 before 2.5 hands what follows "--" to the parent command.
void add_program(CLI::App* run, const std::shared_ptr<RunFlags>& flags) {
  run->prefix_command();
  run->validate_positionals();
  run->add_option("program", flags->program, "The program, followed by its arguments")
      ->type_name("ARGS...")
      ->check(CLI::Validator([](std::string&) { return std::string("never"); }, ""));
}

void add_ranks(CLI::App* run, const std::shared_ptr<RunFlags>& flags) {
  run->add_option(
         "-n,--nproc-per-node,--nproc_per_node", flags->nproc,
         "Ranks on this node: a number, gpu, cpu (one per core), or auto (gpu if there are "
         "GPUs, else cpu)")
      ->type_name("N")
      ->capture_default_str();
  run->add_option("--max-restarts,--max_restarts", flags->options.max_restarts,
                  "Restart all ranks when one fails, up to R times")
      ->type_name("R")
      ->check(CLI::Range(0, 1'000'000))
      ->capture_default_str();
  run->add_option("--log-dir,--log_dir", flags->options.log_dir,
                  "Also write each rank's output to DIR/rank-0.log, ... (restarts append)")
      ->type_name("DIR");
  run->add_option("--grace", flags->options.grace_s,
                  "Seconds between SIGTERM and SIGKILL; 0: after a failure 10, after a signal the "
                  "larger of 30 and three recent steps")
      ->type_name("S")
      ->check(CLI::Validator(is_duration, ""))
      ->capture_default_str();
  run->add_option("--prefix", flags->prefix,
                  "Print the rank before each line: auto (if there are several), always, never")
      ->type_name("WHEN")
      ->check(CLI::IsMember({"auto", "always", "never"}))
      ->capture_default_str();
  run->add_flag("--no-prefix", flags->no_prefix, "The same as --prefix never");
  run->add_flag("-m,--module", flags->module, "The program is a Python module (python3 -m)");
  run->add_flag("--no-python,--no_python", flags->no_python,
                "Execute a .py file directly, not with python3");
}

void add_nodes(CLI::App* run, const std::shared_ptr<RunFlags>& flags) {
  const char* nodes = "Several nodes";
  run->add_option("--nnodes", flags->nnodes,
                  "Number of nodes, or LEAST:MOST: the run goes on with LEAST if others are lost and "
                  "don't come back within --rendezvous-timeout")
      ->type_name("M")
      ->capture_default_str()
      ->group(nodes);
  run->add_option("--node-rank,--node_rank", flags->node_rank, 
                  "This node's number, starting at 0; spare: waits until another one is lost")
      ->type_name("K")
      ->capture_default_str()
      ->group(nodes);
  run->add_option("--master", flags->master,
                  "Address of node 0 and port for rank 0 (default port: 29500)")
      ->type_name("HOST:PORT")
      ->group(nodes);
  run->add_option("--master-addr,--master_addr", flags->master_addr, "The host of --master")
      ->type_name("HOST")
      ->group(nodes);
  run->add_option("--master-port,--master_port", flags->master_port, "The port of --master")
      ->type_name("PORT")
      ->group(nodes);
  run->add_option("--control-port", flags->control_port,
                  "Port on which launchers meet node 0's; default: the port after the master's")
      ->type_name("PORT")
      ->group(nodes);
  run->add_option("--rendezvous-timeout", flags->options.rendezvous_s,
                  "Seconds to wait for all nodes")
      ->type_name("S")
      ->check(CLI::Validator(is_duration, ""))
      ->capture_default_str()
      ->group(nodes);
  run->add_option("--secret-file", flags->secret_file,
                  "File with the run's secret, by which launchers and ranks know each other: the "
                  "same on every node, open to you alone; default: FSDP_SECRET, else "
                  "FSDP_SECRET_FILE")
      ->type_name("FILE")
      ->group(nodes);
  run->add_flag("--standalone", flags->standalone, "One node on a free port (the default)")
      ->group(nodes);
}

}  // namespace

void add_run(CLI::App& app, Action& action) {
  auto flags = std::make_shared<RunFlags>();
  CLI::App* run = app.add_subcommand("run", "Launch a program on every rank, as torchrun does");
  run->footer(kRunExamples);
  add_program(run, flags);
  add_ranks(run, flags);
  add_nodes(run, flags);
  run->callback([run, flags, &action] {
    auto program = program_of(*run);
    action = [flags, program] {
      return launch::run(checking_usage([&] { return options_of(*flags, program); }));
    };
  });
}

}  // namespace fsdp::cli
