#include <CLI/CLI.hpp>
#include "cli/commands.h"
namespace fsdp::cli { void add_doctor(CLI::App& app, Action& action) { auto* c = app.add_subcommand("doctor"); c->callback([&action]{ action=[]{return 0;}; }); } }
