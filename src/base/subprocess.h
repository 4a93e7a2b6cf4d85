// Runs a program and captures its stdout: for probes (fsdp doctor) and for benchmarks that start
// ranks or peers.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/environment.h"
#include "base/namespace.h"

namespace fsdp::base {

struct Finished {
  int code = 0;        // exit code; 128 + signal number; 127 if the program didn't start
  std::string output;  // stdout
};

// Waits for the program to exit. `on_line` gets each line of stdout as it arrives. stderr is shared
// with this process unless `quiet`. `changes` apply to the program's environment.
Finished run_program(const std::vector<std::string>& arguments, bool quiet = true,
                     const std::function<void(const std::string&)>& on_line = {},
                     const std::vector<environment::Change>& changes = {});

// The path of the running binary.
std::string own_binary();

}  // namespace fsdp::base
