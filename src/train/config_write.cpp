#include "train/config_write.h"

#include <sstream>

#include "base/format.h"
#include "train/config_values.h"

namespace fsdp::train {
namespace {

// `text` wrapped into comment lines of at most `columns` characters.
std::string comment(const std::string& text, size_t columns) {
  std::istringstream words(text);
  std::string word, out, line = "#";
  while (words >> word) {
    if (line.size() > 1 && line.size() + 1 + word.size() > columns) {
      out += line + "\n";
      line = "#";
    }
    line += " " + word;
  }
  return out + line + "\n";
}

// Escapes |, which would end a table cell.
std::string cell(const std::string& text) {
  std::string out;
  for (char c : text) out += c == '|' ? std::string("\\|") : std::string(1, c);
  return out;
}

}  // namespace

std::string to_toml(const Config& config) {
  Config copy = config;
  auto all = options(copy);
  std::string out, section;
  for (const Option& option : all) {
    if (option.section != section)
      out += formatted("\n[{}]  # {}\n", option.section, option.section_help);
    section = option.section;
    out += comment(formatted("{} ({})", option.help, expected(option)), 100);
    out += formatted("{} = {}\n", option.key, value_text(option));
  }
  return out;
}

std::string describe_options_markdown() {
  Config defaults;
  auto all = options(defaults);
  std::string out, section = "none yet";
  for (const Option& option : all) {
    if (option.section != section) {
      if (!out.empty()) out += "\n";
      out += formatted("## {}\n\n{}.\n\n| key | default | value | meaning |\n|---|---|---|---|\n",
                       option.section.empty() ? "Top level" : formatted("`[{}]`", option.section),
                       option.section_help);
    }
    section = option.section;
    out += formatted("| `{}` | `{}` | {} | {}", option.key, cell(value_text(option)),
                     cell(expected(option)), cell(option.help));
    if (!option.check.alias.empty()) out += formatted("; short flag `{}`", option.check.alias);
    out += " |\n";
  }
  return out;
}

}  // namespace fsdp::train
