// TOML: reading configs with toml++, and writing values.
//
// Errors have the file and the line. What is valid TOML but of no use in a config (dates, lists of
// numbers, arrays of tables) is refused by name.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace fsdp::train {

// monostate: an empty table.
using TomlHeld =
    std::variant<std::monostate, bool, int64_t, double, std::string, std::vector<std::string>>;

struct TomlEntry {
  std::string name;  // of the table and the key: "optim.lr"
  TomlHeld value;
  std::string raw;  // the value as written in the file, for errors
  int line = 0;
};

struct TomlDocument {
  std::vector<TomlEntry> entries;     // in order
  std::map<int, std::string> tables;  // [name] by its line
};

TomlDocument parse_toml(std::string_view text, const std::string& file);

// A number of a flag, in the syntax of TOML: 1_000, 1e-4, 0x10. monostate if it isn't one.
TomlHeld parse_toml_number(const std::string& word);

std::string toml_string(std::string_view text);  // in quotes, with escapes
std::string toml_number(double value);           // the shortest text that reads as the same double

}  // namespace fsdp::train
