// read_settings: the keys of a run's config as a flat list of texts. Reads what fsdp writes:
// tables, and one key with its value per line. The config itself is checked elsewhere
// (train/config_toml.h).
#include <sstream>

#include "report/run_files.h"

namespace fsdp::report {
namespace {

std::string trimmed(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t\r");
  if (first == std::string::npos) return "";
  return text.substr(first, text.find_last_not_of(" \t\r") - first + 1);
}

// The value at the beginning of `text`, without a comment; a plain string without its quotes.
std::string value_at_start(const std::string& text) {
  char quote = 0;
  size_t end = 0;
  for (; end < text.size(); ++end) {
    const char c = text[end];
    if (quote == '"' && c == '\\')
      ++end;
    else if (quote != 0 && c == quote)
      quote = 0;
    else if (quote == 0 && (c == '"' || c == '\''))
      quote = c;
    else if (quote == 0 && c == '#')
      break;
  }
  const std::string value = trimmed(text.substr(0, end));
  const bool plain = value.size() >= 2 && value.front() == '"' && value.back() == '"' &&
                     value.find_first_of("\"\\", 1) == value.size() - 1;
  return plain ? value.substr(1, value.size() - 2) : value;
}

}  // namespace

std::vector<std::pair<std::string, std::string>> read_settings(const std::string& toml) {
  std::vector<std::pair<std::string, std::string>> all;
  std::istringstream lines(toml);
  std::string section;
  for (std::string line; std::getline(lines, line);) {
    line = trimmed(line);
    if (line.empty() || line.front() == '#') continue;
    if (line.front() == '[') {
      section = line.substr(1, line.find(']') - 1) + ".";
      continue;
    }
    const size_t equals = line.find('=');
    if (equals == std::string::npos) continue;
    all.emplace_back(section + trimmed(line.substr(0, equals)),
                     value_at_start(line.substr(equals + 1)));
  }
  return all;
}

}  // namespace fsdp::report
