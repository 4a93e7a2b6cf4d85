#include "base/table.h"

#include <algorithm>
#include <cmath>
#include <ostream>

#include "base/format.h"
#include "base/terminal.h"
#include "fsdp/error.h"

namespace fsdp {
namespace {

// Columns on a terminal: counts the bytes that start a UTF-8 character.
size_t width(const std::string& text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; });
}

std::string fixed(double value, int digits) {
  return formatted("{:.{}f}", value, digits);
}

Cell cell_of(const nlohmann::ordered_json& line, const LineColumn& column) {
  const auto found = line.find(column.key);
  if (found == line.end()) return {nullptr, ""};
  if (found->is_string()) return text(*found);
  if (!found->is_number() || !std::isfinite(found->get<double>())) return {nullptr, "-"};
  const double value = *found;
  Cell cell{*found, fixed(value, std::max(0, column.digits))};
  if (column.digits == kBytes) cell.text = value == 0 ? "-" : human_bytes(value);
  cell.text = line.value(column.key + "_text", cell.text);
  if (const auto good = line.find(column.key + "_good"); good != line.end())
    cell.colour = *good ? "32" : "31";
  return cell;
}

}  // namespace

Cell number(double value, int digits) {
  return {value, fixed(value, digits)};
}

Cell text(std::string value) {
  return {value, value};
}

void Table::add(std::vector<Cell> row) {
  if (row.size() != columns_.size()) throw Error("a table row has the wrong number of cells.", "");
  rows_.push_back(std::move(row));
}

void Table::print(std::ostream& out, bool json) const {
  if (json) {
    for (const auto& row : rows_) {
      nlohmann::ordered_json line;
      for (size_t c = 0; c < columns_.size(); ++c) line[columns_[c].key] = row[c].value;
      out << line.dump() << "\n";
    }
    return;
  }
  std::vector<size_t> shown, widths(columns_.size());
  for (size_t c = 0; c < columns_.size(); ++c) {
    if (columns_[c].title.empty()) continue;
    shown.push_back(c);
    widths[c] = width(columns_[c].title);
    for (const auto& row : rows_) widths[c] = std::max(widths[c], width(row[c].text));
  }
  auto line = [&](auto cell_of, auto colour_of) {
    std::string text;
    for (size_t c : shown) {
      std::string cell = cell_of(c), pad(widths[c] - width(cell), ' ');
      bool last = c == shown.back();
      std::string painted = paint(STDOUT, colour_of(c), cell);
      if (columns_[c].align == kRight)
        text += pad + painted;
      else
        text += painted + (last ? "" : pad);
      if (!last) text += "  ";
    }
    out << text << "\n";
  };
  line([&](size_t c) { return columns_[c].title; }, [](size_t) { return "1"; });
  for (const auto& row : rows_)
    line([&](size_t c) { return row[c].text; }, [&](size_t c) { return row[c].colour.c_str(); });
}

Table table_of(const std::vector<LineColumn>& columns,
               const std::vector<nlohmann::ordered_json>& lines) {
  std::vector<Table::Column> heads;
  for (const LineColumn& column : columns)
    heads.push_back(
        {column.key, column.title, column.digits == kWords ? Table::kLeft : Table::kRight});
  Table table(heads);
  for (const auto& line : lines) {
    std::vector<Cell> cells;
    for (const LineColumn& column : columns) cells.push_back(cell_of(line, column));
    table.add(cells);
  }
  return table;
}

std::string human_bytes(double bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  while (bytes >= 1024 && unit < 4) bytes /= 1024, ++unit;
  bool whole = std::abs(bytes - std::round(bytes)) < 0.05 || bytes >= 100;
  return fixed(bytes, whole ? 0 : 1) + " " + units[unit];
}

std::string with_separators(int64_t number) {
  std::string digits = std::to_string(number), out;
  if (number < 0) digits.erase(0, 1);
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i && (digits.size() - i) % 3 == 0) out += ',';
    out += digits[i];
  }
  return number < 0 ? "-" + out : out;
}

}  // namespace fsdp
