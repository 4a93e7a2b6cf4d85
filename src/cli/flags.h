// Flags: the flags of one command, declared one by one.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <type_traits>
#include <vector>

#include "cli/commands.h"

namespace fsdp::cli {

struct Flags {
  CLI::App& command;

  // Adds the command `name` to `app`. `footer` ends its help.
  Flags(CLI::App& app, const char* name, const char* help, const char* footer)
      : command(*app.add_subcommand(name, help)) {
    command.footer(footer);
  }

  void group(const char* title) { command.option_defaults()->group(title); }  // of the next flags
  void flag(const char* name, bool& value, const char* help) {
    command.add_flag(name, value, help);
  }

  // Help shows the default. `type` stands for the value there; null: a word for the C++ type.
  template <typename Value>
  CLI::Option* any(const char* name, Value& value, const char* help, const char* type = nullptr) {
    CLI::Option* option = command.add_option(name, value, help)->capture_default_str();
    return type ? option->type_name(type) : option;
  }
  // A number from `least` to `most`.
  template <typename Number>
  CLI::Option* number(const char* name, Number& value, const char* help, double least = 1,
                      double most = 1e12, const char* type = "N") {
    using Bound = std::conditional_t<std::is_integral_v<Number>, int64_t, double>;
    const CLI::Range range(static_cast<Bound>(least), static_cast<Bound>(most));
    return any(name, value, help, type)->check(range.description(""));
  }
  // One of `choices`; if `Value` is a vector, some of them, separated by commas.
  template <typename Value>
  CLI::Option* choice(const char* name, Value& value, const std::vector<std::string>& choices,
                      const char* help) {
    return any(name, value, help)->check(CLI::IsMember(choices))->delimiter(',');
  }

  // What the command does with the flags that were given.
  template <typename Given>
  void runs(Action& action, const std::shared_ptr<Given>& given, int (*work)(Given)) {
    command.callback([=, &action] { action = [=] { return work(*given); }; });
  }
  // The same for a command that starts ranks of itself by rank_program (ranks.h). A rank runs
  // `rank` with its row.
  template <typename Row, typename Given>
  void runs(Action& action, const std::shared_ptr<Given>& given, int (*parent)(Given),
            const std::function<int(const Row&)>& rank) {
    auto row = std::make_shared<std::string>();
    command.add_option("--worker", *row, "")->group("");
    command.callback([=, &action] {
      action = [=] {
        return row->empty() ? parent(*given) : rank(nlohmann::json::parse(*row).get<Row>());
      };
    });
  }
};

}  // namespace fsdp::cli
