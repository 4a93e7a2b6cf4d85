#include "train/config_flags.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>

#include "base/format.h"
#include "base/nearest.h"
#include "fsdp/error.h"
#include "train/config.h"
#include "train/config_values.h"

namespace fsdp::train {
namespace {

std::string type_name(const Option& option) {
  struct Words {
    std::string operator()(bool*) const { return "[BOOL]"; }
    std::string operator()(int64_t*) const { return "N"; }
    std::string operator()(double*) const { return "X"; }
    std::string operator()(std::string*) const { return "TEXT"; }
    std::string operator()(std::vector<std::string>*) const { return "TEXT"; }
    std::string operator()(const EnumField& field) const {
      std::string all;
      for (const auto& name : field.names()) all += (all.empty() ? "" : "|") + name;
      all += field.takes_number() ? "|N" : "";
      return all.find("true") == std::string::npos ? all : "[" + all + "]";
    }
  };
  return std::visit(Words{}, option.target);
}

std::string help(const Option& option) {
  bool is_list = std::holds_alternative<std::vector<std::string>*>(option.target);
  return formatted("{}{} (default: {})", option.help, is_list ? "; repeat for more" : "",
                   value_text(option));
}

std::string group(const Option& option) {
  if (option.section.empty()) return option.section_help;
  return formatted("[{}] {}", option.section, option.section_help);
}

// All names of all flags, without the dashes.
std::vector<std::string> spellings(const std::vector<Option>& all) {
  std::vector<std::string> names;
  for (const Option& option : all) {
    names.push_back(option.name());
    if (!option.check.alias.empty()) names.push_back(option.check.alias.substr(2));
  }
  return names;
}

[[noreturn]] void refuse_unknown(const std::string& word, const CLI::App& command) {
  if (!word.starts_with("-"))
    throw Error(formatted("unexpected argument \"{}\".", word), "flags look like --optim.lr 1e-4.");
  std::string name = word.substr(word.find_first_not_of('-'));
  name = name.substr(0, name.find('='));
  Config defaults;
  auto all = options(defaults);
  std::vector<std::string> others;  // short flags, and flags of the command itself
  for (const CLI::Option* option : command.get_options()) {
    for (const auto& long_name : option->get_lnames()) {
      if (long_name.find('.') == std::string::npos) others.push_back(long_name);
    }
  }
  const bool dotted = name.find('.') != std::string::npos;  // a key of a config
  std::string near = dotted ? "" : nearest_word(others, name);
  if (const Option* option = nearest(all, name); near.empty() && option) near = option->name();
  throw Error(
      formatted("there is no flag {}.", word.substr(0, word.find('='))),
      formatted("{}{} --help lists all flags.",
                near.empty() ? "" : formatted("did you mean --{}? ", near), command.get_name()));
}

void add(CLI::App& command, const Option& option, CommandLine& line,
         const std::shared_ptr<const std::vector<std::string>>& known) {
  const bool switches = is_switch(option);
  std::vector<std::string> words;  // that a switch takes beside true, false and their synonyms
  if (const auto* field = std::get_if<EnumField>(&option.target); field && switches)
    words = field->names();
  std::string names = option.flag();
  if (!option.check.alias.empty()) names = option.check.alias + "," + names;
  CLI::callback_t take = [&line, known, switches, words,
                          name = option.name()](const CLI::results_t& given) {
    const std::string& word = given.back();
    bool is_flag = word.starts_with("--") &&
                   std::find(known->begin(), known->end(), word.substr(2)) != known->end();
    if (is_flag)  // --dir= --resume: CLI11 takes the next word if a value is empty
      throw Error(formatted("--{} has no value: {} follows it.", name, word),
                  formatted("pass --{} VALUE.", name));
    // `--resume my.toml`: a switch needs no value, so the next word is a config.
    const bool other = std::find(words.begin(), words.end(), word) == words.end();
    if (switches && !word.empty() && !flag_word(word) && other) {
      line.flags.emplace_back(name, "true");
      line.configs.push_back(word);
    } else {
      line.flags.emplace_back(name, switches && word.empty() ? "true" : word);
    }
    return true;
  };
  CLI::Option* added = command.add_option(names, std::move(take), help(option));
  // One call per occurrence on the line, so that order is kept and nothing is joined.
  added->expected(switches ? 0 : 1, 1)->trigger_on_parse()->allow_extra_args(false);
  added->type_name(type_name(option))->group(group(option));
}

}  // namespace

void declare(CLI::App& command, CommandLine& line) {
  Config defaults;
  auto all = options(defaults);
  auto known = std::make_shared<const std::vector<std::string>>(spellings(all));
  command
      .add_option_function<std::vector<std::string>>(
          "config",
          [&line](const std::vector<std::string>& words) {
            line.configs.insert(line.configs.end(), words.begin(), words.end());
          },
          "TOML file, or name of a ready config (--list-configs)")
      ->type_name("CONFIG");
  for (const Option& option : all) add(command, option, line, known);
  command.allow_extras();
  command.parse_complete_callback([&command] {
    for (const auto& word : command.remaining()) refuse_unknown(word, command);
  });
}

}  // namespace fsdp::train
