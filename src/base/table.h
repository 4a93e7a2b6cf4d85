// Table: the output of every command that reports something. The same rows print as aligned columns
// or, with --json, as one JSON object per line with stable keys.
#pragma once

#include <iosfwd>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace fsdp {

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

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<Cell>> rows_;
};

// A column of JSON lines. It is empty in a line without the key, and "-" where a number is null or
// not finite. A line may have KEY_text, which is shown instead, and KEY_good, which colours it.
struct LineColumn {
  std::string key, title;  // as in Table::Column
  int digits;              // of a number; or one of the following
};
inline constexpr int kWords = -1;  // aligned to the left
inline constexpr int kBytes = -2;
Table table_of(const std::vector<LineColumn>& columns,
               const std::vector<nlohmann::ordered_json>& lines);

std::string human_bytes(double bytes);        // "64 MiB", "1.5 GiB"
std::string with_separators(int64_t number);  // "50,331,648"

}  // namespace fsdp
