#include "train/config_write.h"

#include <sstream>

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
      out += "\n[" + option.section + "]  # " + option.section_help + "\n";
    section = option.section;
    out += comment(option.help + " (" + expected(option) + ")", 100);
    out += option.key + " = " + value_text(option) + "\n";
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
      out += "## " + (option.section.empty() ? "Top level" : "`[" + option.section + "]`") +
             "\n\n" + option.section_help +
             ".\n\n| key | default | value | meaning |\n|---|---|---|---|\n";
    }
    section = option.section;
    out += "| `" + option.key + "` | `" + cell(value_text(option)) + "` | " +
           cell(expected(option)) + " | " + cell(option.help);
    if (!option.check.alias.empty()) out += "; short flag `" + option.check.alias + "`";
    out += " |\n";
  }
  return out;
}

}  // namespace fsdp::train
