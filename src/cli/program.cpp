#include "cli/program.h"

#include <CLI/CLI.hpp>
#include <filesystem>
#include <iostream>
#include <string_view>

#include "base/exit_code.h"
#include "base/format.h"
#include "base/log.h"
#include "base/printable.h"
#include "base/subprocess.h"
#include "base/terminal.h"
#include "fsdp/error.h"

namespace fsdp::cli {
namespace {

// CLI11 only says that a command is missing; this error names the unknown word and lists what
// exists.
void refuse_unknown_command(const CLI::App& app, int argc, char** argv) {
  const CLI::App* at = &app;
  std::string path = app.get_name();
  for (int i = 1; i < argc; ++i) {
    auto commands = at->get_subcommands([](const CLI::App*) { return true; });
    std::string word = argv[i];
    if (commands.empty() || word.starts_with("-")) return;
    std::string known;
    const CLI::App* next = nullptr;
    for (const CLI::App* command : commands) {
      known += (known.empty() ? "" : ", ") + command->get_name();
      if (command->check_name(word)) next = command;
    }
    if (!next)
      throw Error(formatted("there is no command \"{} {}\".", path, word),
                  formatted("{} has: {}; {} --help describes them.", path, known, path));
    path += " " + word;
    at = next;
  }
}

}  // namespace

int run_command(CLI::App& app, const Action& action, int argc, char** argv) {
  if (argc == 1 || (argc == 2 && std::string_view(argv[1]) == "help")) {
    std::cout << app.help();
    return 0;
  }
  try {
    refuse_unknown_command(app, argc, argv);
  } catch (const Error& problem) {
    log::error(problem);
    return kExitUsage;
  }
  try {
    checking_usage([&] { app.parse(argc, argv); });
    return action();
  } catch (const CLI::ParseError& problem) {
    if (problem.get_exit_code() == 0) return app.exit(problem);  // --help, --version
    std::cerr << "fsdp: " << paint(STDERR, "31", "error") << ": " << printable(problem.what())
              << "\n  HINT: " << app.get_name();
    for (auto* command : app.get_subcommands()) {
      std::cerr << " " << command->get_name();
      for (auto* inner : command->get_subcommands()) std::cerr << " " << inner->get_name();
    }
    std::cerr << " --help lists its options.\n";
    return kExitUsage;
  } catch (const std::exception& failure) {
    log::error(failure);
    return exit_code(failure);
  }
}

std::string beside(const std::string& name) {
  return (std::filesystem::path(own_binary()).parent_path() / name).string();
}

}  // namespace fsdp::cli
