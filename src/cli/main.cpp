// fsdp: the command line. Each command lives in its own file; this one gathers them, and turns
// whatever escapes into one line and a non-zero exit.
#include <CLI/CLI.hpp>
#include <iostream>
#include <string_view>

#include "base/log.h"
#include "base/terminal.h"
#include "cli/commands.h"
#include "fsdp/error.h"
#include "fsdp/version.h"

namespace {

// CLI11 would only say that a command is missing, not which word it did not know.
void refuse_unknown_command(const CLI::App& app, int argc, char** argv) {
  const CLI::App* at = &app;
  std::string path = "fsdp";
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
      throw fsdp::Error("there is no command \"" + path + " " + word + "\".",
                        path + " has: " + known + "; " + path + " --help tells more.");
    path += " " + word;
    at = next;
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"fsdp: Fully Sharded Data Parallel for C++.", "fsdp"};
  app.set_version_flag("--version", "fsdp " FSDP_VERSION);
  app.footer("Every command has its own --help. Start with: fsdp train");
  app.require_subcommand(1);
  fsdp::cli::Action action;
  fsdp::cli::add_train(app, action);
  fsdp::cli::add_generate(app, action);
  fsdp::cli::add_tokenize(app, action);
  fsdp::cli::add_ckpt(app, action);
  fsdp::cli::add_plan(app, action);
  fsdp::cli::add_explain(app, action);
  fsdp::cli::add_run(app, action);
  fsdp::cli::add_bench(app, action);
  fsdp::cli::add_doctor(app, action);
  if (argc == 1 || (argc == 2 && std::string_view(argv[1]) == "help")) {
    std::cout << app.help();
    return 0;
  }
  try {
    refuse_unknown_command(app, argc, argv);
  } catch (const fsdp::Error& problem) {
    fsdp::log::error(problem);
    return 2;
  }
  try {
    app.parse(argc, argv);
    return action();
  } catch (const CLI::ParseError& problem) {
    if (problem.get_exit_code() == 0) return app.exit(problem);  // --help, --version
    std::cerr << "fsdp: " << fsdp::paint(fsdp::STDERR, "31", "error") << ": " << problem.what()
              << "\n  HINT: fsdp";
    for (auto* command : app.get_subcommands()) {
      std::cerr << " " << command->get_name();
      for (auto* inner : command->get_subcommands()) std::cerr << " " << inner->get_name();
    }
    std::cerr << " --help shows what it takes.\n";
    return 2;
  } catch (const std::exception& failure) {
    fsdp::log::error(failure);
    return 1;
  }
}
