// fsdp bench: replaces itself with fsdp-bench, a separate program (src/bench), so that training
// doesn't require compiling the benchmarks.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "base/exit_code.h"
#include "base/format.h"
#include "base/log.h"
#include "cli/commands.h"
#include "cli/program.h"
#include "fsdp/error.h"

namespace fsdp::cli {

void list_bench(CLI::App& app) {
  app.add_subcommand("bench",
                     "Measure collectives, training, offload and checkpoints beside PyTorch");
}

int exec_bench(char** arguments) {
  std::string program = beside("fsdp-bench");
  std::vector<char*> argv = {program.data()};
  while (*arguments) argv.push_back(*arguments++);
  argv.push_back(nullptr);
  execv(argv[0], argv.data());
  const int reason = errno;  // execv returns only when it failed
  log::error(reason == ENOENT
                 ? Error(formatted("there is no {}: the benchmarks aren't built.", program),
                         "./fsdp bench builds them; or: cmake --build DIR --target fsdp_bench.")
                 : Error(formatted("can't start {}: {}.", program, std::strerror(reason)),
                         "build it again: cmake --build DIR --target fsdp_bench."));
  return reason == ENOENT ? kExitNotFound : kExitCannotRun;
}

}  // namespace fsdp::cli
