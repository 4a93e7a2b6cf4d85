// A strict reader of the part of TOML that configs need: tables, dotted keys, strings on one line,
// whole numbers, floats, booleans and lists of strings; comments anywhere. The rest of TOML (inline
// tables, tables in lists, dates, strings over several lines) is refused by name.
//
// CLI11 has a reader of its own, but it guesses: it cuts a string at a # in it, takes a line
// without = for a switch, joins the values of a key that stands twice and knows no escapes, all in
// silence.
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
  std::string raw;  // as it stands in the file, for errors
};

struct Entry {
  std::string name;  // "optim.lr": the table's name and the key's
  Value value;
  int line = 0;
};

struct Document {
  std::vector<Entry> entries;         // in their order
  std::map<std::string, int> tables;  // the line of [name]; only those with a header
};

// Anything that is not understood, and every key or table that stands twice, is an Error with
// `file` and the line.
Document parse(std::string_view text, const std::string& file);

}  // namespace fsdp::train::toml
