// Table: the output of every command that reports something. The same rows print as aligned columns
// or, with --json, as one JSON object per line with stable keys.
#pragma once

#include <iosfwd>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/namespace.h"

namespace fsdp::base {

struct Cell {
  nlohmann::ordered_json value;  // what --json prints
  std::string text;              // what the columns show
  std::string colour = "";       // SGR colour on a terminal
};

// A number shown with `digits` decimal places.
Cell number(double value, int digits);
Cell text(std::string value);

class Table {
 public:
  enum Align { kLeft, kRight };
  struct Column {
    std::string key;    // in JSON
    std::string title;  // column heading; empty: JSON only
    Align align = kRight;
  };

  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  void add(std::vector<Cell> row);  // one cell per column
  void print(std::ostream& out, bool json) const;
  void print_rows(std::ostream& out) const;  // columns without their headings

 private:
  void print_columns(std::ostream& out, bool headings) const;

  std::vector<Column> columns_;
  std::vector<std::vector<Cell>> rows_;
};

// A table of JSON lines. `columns` are separated by semicolons, each "KEY=TITLE FORMAT": the title
// is the key with spaces by default, and empty for JSON only; the format is .3 for three decimal
// places, B for bytes, and nothing for words, which are aligned to the left.
//
//   table_of("what; time_us=us .1; size B; threads= .0", lines)
//
// A cell is empty in a line without the key, and "-" where a number is null or not finite. A line
// may have KEY_text, which is shown instead, and KEY_good, which colours it.
Table table_of(const std::string& columns, const std::vector<nlohmann::ordered_json>& lines);

// Bytes: "64K", "5GB", "64MiB", "1048576". `kilo` is the factor of K; with an i it is always 1024.
std::optional<int64_t> parse_bytes(const std::string& text, int kilo);
std::string human_bytes(double bytes);                         // "64 MiB", "1.5 GiB"
std::string with_separators(int64_t number);                   // "50,331,648"
std::string count_of(int64_t count, const std::string& noun);  // "1 rank", "2,048 parameters"

}  // namespace fsdp::base
