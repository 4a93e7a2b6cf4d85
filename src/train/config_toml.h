// A strict parser of the TOML that configs need: tables, dotted keys, single-line strings,
// integers, floats, booleans, lists of strings, and comments. The rest of TOML (inline tables,
// arrays of tables, dates, multi-line strings) is refused by name.
//
// CLI11 has a parser, but it guesses: without a warning it cuts a string at a #, takes a line
// without = for a switch, joins the values of duplicate keys and ignores escapes.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace fsdp::train::toml {

struct Value {
  std::variant<bool, int64_t, double, std::string, std::vector<std::string>> held;
  std::string raw;  // as written in the file, for errors
};

struct Entry {
  std::string name;  // of the table and the key: "optim.lr"
  Value value;
  int line = 0;
};

struct Document {
  std::vector<Entry> entries;         // in order
  std::map<std::string, int> tables;  // the line of [name]; only those with a header
};

// Unsupported syntax and duplicate keys or tables are Errors with `file` and the line.
Document parse(std::string_view text, const std::string& file);

}  // namespace fsdp::train::toml
