// What the programs fsdp and fsdp-bench share: parsing a command line, running the chosen command,
// and finding each other.
#pragma once

#include <string>

#include "cli/commands.h"

namespace fsdp::cli {

// Parses the arguments and runs the chosen command. Returns the exit code (base/exit_code.h). A
// command line that can't be parsed and a command that failed print one error and a hint to stderr.
// Without arguments, or with "help", prints the help.
int run_command(CLI::App& app, const Action& action, int argc, char** argv);

// The path of program `name` in the directory of the running binary. It may not exist.
std::string beside(const std::string& name);

}  // namespace fsdp::cli
