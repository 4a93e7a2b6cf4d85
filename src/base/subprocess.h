// Runs a program and reads what it prints: for probes (fsdp doctor) and for benchmarks that start
// ranks or peers.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/environment.h"

namespace fsdp {

struct Finished {
  int code = 0;        // exit code; 128 + signal; 127 if the program could not be started
  std::string output;  // stdout
};

// Waits for it to end. `on_line` sees each line of stdout as it comes; stderr goes where ours goes
// unless `quiet`. `changes` are made to its environment.
Finished run_program(const std::vector<std::string>& arguments, bool quiet = true,
                     const std::function<void(const std::string&)>& on_line = {},
                     const std::vector<environment::Change>& changes = {});

// The path of the running binary.
std::string own_binary();

}  // namespace fsdp
