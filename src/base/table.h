// Table: the output of every command that reports something. The same rows print as aligned columns
// or, with --json, as one JSON object per line with stable keys.
#pragma once

#include <iosfwd>
#include <nlohmann/json.hpp>
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

std::string human_bytes(double bytes);        // "64 MiB", "1.5 GiB"
std::string with_separators(int64_t number);  // "50,331,648"

}  // namespace fsdp::base
